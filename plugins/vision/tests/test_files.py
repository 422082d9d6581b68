"""Odd files give the stated picture, bad ones one line."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from corerl.config import DataConfig
from corerl.data import Refused, load_prompts
from corerl.errors import DataError
from corerl.models import load_tokenizer
from corerl_vision.files import file_of, opened, pixels_of
from corerl_vision.reader import VisionReader
from corerl_vision.spec import VisionOptions
from plugins.vision.tests.test_processor import model_of

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shown(cell: Any, root: str = "") -> Any:
    return pixels_of(file_of(cell, root=root, max_bytes=1e6, max_pixels=1e6))


def refused(cell: Any, text: str, root: str = "") -> None:
    with pytest.raises(Refused, match=re.escape(text)):
        shown(cell, root)


def halves() -> Image.Image:
    """Red at the left, white at the right; 8 wide, 4 high."""
    image = Image.new("RGB", (8, 4), WHITE)
    image.paste(RED, (0, 0, 4, 4))
    return image


def bomb() -> bytes:
    """The beginning of a PNG of 20,000 x 20,000."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(64))
    chunks = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (head, data))
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("form", ["bytes", "struct", "path", "path of a struct", "file:", "data:", "wrong extension"])
def test_each_form_of_a_cell_is_the_same_picture(form: str, tmp_path: Path) -> None:
    content = saved(halves())
    name = "a.jpg" if form == "wrong extension" else "a.png"
    (tmp_path / name).write_bytes(content)
    cell: Any = {
        "bytes": content,
        "struct": {"bytes": content, "path": "elsewhere.png"},
        "path of a struct": {"bytes": None, "path": name},
        "file:": f"file://{tmp_path / name}",
        "data:": "data:image/png;base64," + base64.b64encode(content).decode(),
    }.get(form, name)
    np.testing.assert_array_equal(shown(cell, str(tmp_path)), np.asarray(halves()))


@pytest.mark.parametrize("odd", [b"", struct.pack("<HHI4s", 0x0128, 2, 2, b"2")])  # a text in the place of a number
def test_a_rotated_photograph_stands_upright(odd: bytes) -> None:
    turned = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)  # its top is at the right of what is stored
    fields = struct.pack("<H", 1 + bool(odd)) + turned + odd
    pixels = shown(saved(halves(), exif=b"Exif\0\0II*\0\x08\0\0\0" + fields + bytes(4)))
    assert pixels.shape == (8, 4, 3)
    assert (tuple(pixels[0, 0]), tuple(pixels[-1, 0])) == (RED, WHITE)


def test_a_photograph_with_a_preview_is_the_photograph() -> None:
    content = saved(halves(), "MPO", save_all=True, append_images=[Image.new("RGB", (2, 2))], subsampling=0)
    np.testing.assert_allclose(shown(content), np.asarray(halves()), atol=8)


def test_transparent_pixels_are_shown_over_white() -> None:
    assert shown(saved(Image.new("RGBA", (2, 2), (255, 0, 0, 0)))).min() == 255
    assert tuple(shown(saved(Image.new("LA", (2, 2), (0, 51))))[0, 0]) == (204, 204, 204)


def test_a_transparent_entry_of_a_palette_is_white() -> None:
    image = halves().quantize(2)
    pixels = shown(saved(image, transparency=image.getpixel((0, 0))))
    assert pixels.min() == 255


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 32_896, 65_535]], np.uint16)
    assert shown(saved(Image.fromarray(values)))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P", "YCbCr"])
def test_other_modes_become_rgb(mode: str) -> None:
    stored = halves().convert(mode)
    kind = {"CMYK": "TIFF", "YCbCr": "TIFF"}.get(mode, "PNG")
    np.testing.assert_array_equal(shown(saved(stored, kind)), np.asarray(stored.convert("RGB")))


def test_pictures_that_are_read_at_once_hide_no_later_warning() -> None:
    file = file_of(saved(halves()), root="", max_bytes=1e6, max_pixels=1e6)
    first, second = opened(file), opened(file)  # by two threads
    for opening in (first, second):
        opening.__enter__()
    for closing in (first, second):
        closing.__exit__(None, None, None)
    with pytest.raises(UserWarning, match="later"):  # as all of them are errors in tests
        warnings.warn("later", stacklevel=1)


REFUSED: list[tuple[Any, str]] = [
    (saved(Image.effect_noise((64, 64), 50))[:900], "cannot be decoded"),
    (b"", "none of PNG"),
    (b"a text", "none of PNG"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
    (bomb(), "more than 178,956,970 pixels"),
    (saved(Image.new("RGB", (201, 1))), "more than 200 to 1"),
    (saved(halves(), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 4))]), "has 2 frames"),
    (saved(Image.new("F", (2, 2)), "TIFF"), "floating-point"),
    (saved(halves()) + bytes(2_000_000), "raise pictures.vision.max_megabytes"),
    ("https://example.org/a.png", "a run downloads nothing"),
    ("data:image/png;base64,###", "data:image/png;base64,..."),
    ("data:image/png,abc", "not in base64"),
    (7, "7 is no picture"),
    ("../outside.png", "is outside of"),
    ("/dev/zero", "is outside of"),
    ("link.png", "is outside of"),
    ("missing.png", "is not there"),
    ("pipe.png", "is no file"),
    (".", "is no file"),
    ("a\0b", "is no path"),
    ("a" * 5000, "is no path"),
]


def write_odd_files(root: Path) -> None:
    root.mkdir()
    (root.parent / "outside.png").write_bytes(saved(halves()))
    (root / "link.png").symlink_to(root.parent / "outside.png")
    os.mkfifo(root / "pipe.png")


@pytest.mark.parametrize(("cell", "text"), REFUSED)
def test_what_cannot_be_shown_is_refused(cell: Any, text: str, tmp_path: Path) -> None:
    write_odd_files(tmp_path / "data")
    refused(cell, text, str(tmp_path / "data"))


@pytest.mark.parametrize(("cell", "text"), [(b"a text", "none of PNG"), ("missing.png", "is not there")])
def test_a_refused_picture_is_one_line_with_its_row(cell: Any, text: str, tmp_path: Path) -> None:
    write_odd_files(root := tmp_path / "data")
    if isinstance(cell, bytes):
        file = root / "rows.parquet"
        pq.write_table(pa.table({"prompt": ["a", "<image>a"], "images": [None, cell]}), file)
    else:
        file = root / "rows.jsonl"
        rows = [{"prompt": "a"}, {"prompt": "<image>a", "images": cell}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(tokenizer="characters:a<>", path="")
    reader = VisionReader(VisionOptions(max_megabytes=1.0), model_of("qwen3_vl", tmp_path), tokenizer)
    with pytest.raises(DataError) as raised:
        load_prompts(DataConfig(source=str(file), held_out=0), seed=0, pictures=reader)
    line = raised.value.message
    assert re.match(rf"\S*{file.name}(:2|, row 1): ", line) and text in line and "\n" not in line


def test_the_text_of_a_file_tells_its_content_from_others() -> None:
    one, other = saved(halves()), saved(halves().rotate(180))
    texts = [str(file_of(cell, root="", max_bytes=1e6, max_pixels=1e6)) for cell in (one, other, bytes(one))]
    assert texts[0] == texts[2] != texts[1]
