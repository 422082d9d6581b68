"""Picture files, from a row's cell to pixels. Whatever a file holds is shown as a person would see it, or refused."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen
from PIL import ExifTags, Image
from xxhash import xxh3_128_digest

from corerl.data import Refused
from corerl.messages import one_line, short_repr
from corerl.types import Array

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
LONGEST = 200  # times as long as it is wide, or the other way around: no tower takes more
SHOWN = 80  # characters of a value that a message shows
UNREADABLE = "with pictures that cannot be read"
SIXTEEN = 257  # 65535 / 255
# By the orientation in EXIF data. ImageOps.exif_transpose writes all other fields anew, which fails for odd ones.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@frozen(eq=False)
class File:
    """A picture's file, which has been looked into and not been decoded."""

    name: str  # for messages
    content: bytes | Path = field(repr=False)

    def read(self) -> bytes:
        """Raises Refused."""
        try:
            return self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        except OSError as error:
            raise Refused(UNREADABLE, f"{self.name} cannot be read: {error.strerror}") from error

    def digest(self) -> bytes:
        """Of its content. Raises Refused."""
        return xxh3_128_digest(self.read())

    def __str__(self) -> str:
        """Tells files apart without a look at those that are on disk."""
        return f"{self.name} {self.digest().hex()}" if isinstance(self.content, bytes) else str(self.content)


def file_of(cell: Any, *, root: str, max_bytes: float, max_pixels: float) -> File:
    """The file that a cell holds or names: bytes, a path, a `data:` URI, or an object of `bytes` and `path` as
    `datasets` stores pictures. Raises Refused unless its beginning is that of a picture that can be shown."""
    if isinstance(cell, Mapping):
        cell = next((cell[name] for name in ("bytes", "path", "url") if cell.get(name)), None)
    match cell:
        case bytes() | bytearray():
            file = File("a picture", bytes(cell))
        case str() if cell.startswith("data:"):
            file = File(f"{cell.partition(',')[0]},...", _decoded(cell))
        case str() if cell:
            file = _at(cell, root)
        case _:
            raise Refused(
                UNREADABLE,
                f"{short_repr(cell, SHOWN)} is no picture; wanted bytes, a path, a data: URI, or an object of bytes "
                "and path",
            )
    size = len(file.content) if isinstance(file.content, bytes) else file.content.stat().st_size
    if size > max_bytes:
        raise Refused(
            "with too large pictures",
            f"{file.name} has {size / 1e6:.1f} MB, at most {max_bytes / 1e6:g} are read; raise "
            "pictures.vision.max_megabytes, or reduce it",
        )
    with opened(file) as image:
        _require_showable(image, file.name, max_pixels)
    return file


def pixels_of(file: File) -> Array:
    """[H, W, 3] uint8: upright, over white where it is transparent, 16 bits scaled to 8. Raises Refused."""
    with opened(file) as image:
        image.load()
        turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
        upright = image if turn is None else image.transpose(turn)
        if upright.mode.startswith("I"):  # 16 bits, which convert() would clip
            values = np.asarray(upright).astype(np.float64)
            grey = np.clip(values / SIXTEEN, 0, 255).round().astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        if "transparency" in upright.info or upright.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
            over = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
        return np.asarray(upright.convert("RGB"))


def _at(path: str, root: str) -> File:
    if path.partition("://")[0] in ("http", "https", "ftp", "s3", "gs"):
        raise Refused(
            "with pictures elsewhere", f"{short_repr(path, SHOWN)} is not on this machine; a run downloads nothing"
        )
    if not root:
        raise Refused(
            UNREADABLE, f"{short_repr(path, SHOWN)}: nothing says which directory it is in; set pictures.vision.root"
        )
    base = Path(root).resolve()
    name = short_repr(path, SHOWN)
    try:
        whole = (base / path.removeprefix("file://")).resolve()
        whole.stat()
    except FileNotFoundError:
        pass  # said below, if it would be inside
    except (OSError, ValueError) as error:  # a name too long, or with a zero byte
        raise Refused(UNREADABLE, f"{name} is no path: {one_line(error)}") from error
    if not whole.is_relative_to(base):
        raise Refused("with pictures elsewhere", f"{name} is outside of {base}; set pictures.vision.root")
    if not whole.is_file():
        kind = "no file" if whole.exists() else "not there"
        raise Refused(UNREADABLE, f"{name} is {kind}, in {base}; set pictures.vision.root")
    return File(name, whole)


def _decoded(uri: str) -> bytes:
    head, _, text = uri.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not in base64")
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise Refused(UNREADABLE, f"{head},...: {one_line(error)}") from error


@contextmanager
def opened(file: File) -> Iterator[Image.Image]:
    """Whatever fails in the block is the file's fault."""
    try:
        # Of large pictures, and of wrong fields that do not matter. For good, since threads that restored filters in
        # turns would hide every later warning of the process.
        warnings.filterwarnings("ignore", module="PIL")
        source = io.BytesIO(file.content) if isinstance(file.content, bytes) else file.content
        with Image.open(source, formats=FORMATS) as image:
            yield image
    except Refused:
        raise
    except Image.DecompressionBombError as error:  # by the header
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise Refused(
            "with too large pictures", f"{file.name} has more than {most:,} pixels, Pillow's own limit; reduce it"
        ) from error
    except Exception as error:  # Pillow's readers raise what they come across
        what = f"none of {', '.join(FORMATS)}" if isinstance(error, Image.UnidentifiedImageError) else one_line(error)
        raise Refused(UNREADABLE, f"{file.name} cannot be decoded: {what}") from error


def _require_showable(image: Image.Image, name: str, max_pixels: float) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise Refused(
            "with too large pictures",
            f"{name} has {width} x {height} pixels, at most {max_pixels / 1e6:g} million are decoded; raise "
            "pictures.vision.max_megapixels, or reduce it",
        )
    if max(width, height) > LONGEST * min(width, height):
        raise Refused("with too long pictures", f"{name} has {width} x {height} pixels, more than {LONGEST} to 1")
    # An MPO is a JPEG whose other pictures are a preview, or a map of depth or brightness.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise Refused("with moving pictures", f"{name} has {getattr(image, 'n_frames', 2)} frames, wanted one")
    if image.mode == "F":
        raise Refused(UNREADABLE, f"{name} has floating-point pixels, of which nothing says what is white")
