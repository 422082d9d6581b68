"""Pictures as SGLang takes them: PNG in a `data:` URI, and in the tokens one placeholder for each.

SGLang (0.5.17) makes of the i-th placeholder as many as its processor counts for the i-th picture. Given any other
number of placeholders than pictures it never answers.
"""

from __future__ import annotations

import base64
import itertools
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from corerl.errors import ConfigError, EngineFailed
from corerl.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from corerl.config import ModelConfig
    from corerl.engines import GenerateRequest
    from corerl.pictures import Picture
    from corerl.types import Array, IntArray

# Model types whose pictures SGLang expands in the text: it counts the tokens that end their rows as placeholders, finds
# another number than the processor, and tokenizes what the processor has written.
IN_TEXT = ("mistral3", "pixtral")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB = (8, 2, 0, 0, 0)  # bits of a channel, colour type, compression, filters, interlacing
UP = 2  # the filter that subtracts the row above


def data_uri(picture: Picture) -> str:
    return "data:image/png;base64," + base64.b64encode(png(picture.pixels)).decode()


def png(pixels: Array) -> bytes:
    """A PNG file of `pixels`, [H, W, 3] uint8."""
    height, width, _ = pixels.shape
    rows = np.full((height, 1 + 3 * width), UP, np.uint8)
    flat = pixels.reshape(height, -1)
    rows[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])
    header = struct.pack(">II5B", width, height, *RGB)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def placeholder_of(config: PreTrainedConfig) -> int:
    """The id of the token that SGLang takes for a picture."""
    for name in ("image_token_id", "image_token_index"):
        if (found := getattr(config, name, None)) is not None:
            return int(found)
    raise ConfigError(
        f"model.pictures: the config of a {config.model_type} model names no token for pictures (image_token_id), so "
        "SGLang cannot show it any; use rollout.engine='transformers'"
    )


def contracted(tokens: IntArray, column: IntArray, placeholder: int, *, in_text: bool) -> list[int]:
    """A row's tokens [n] with one placeholder in the place of each picture's; `column` [n] as in `GenerateRequest`.
    With `in_text` also without what a processor writes between and behind them."""
    edges = np.flatnonzero(np.diff(column, prepend=0, append=0))
    keep = np.ones(len(tokens), dtype=bool)
    for begin, end in itertools.pairwise(edges):
        places = begin + np.flatnonzero(tokens[begin:end] == placeholder) if column[begin] else []
        if len(places):
            keep[places[0] + 1 : end + in_text] = False
    return [int(token) for token in tokens[keep]]


def shown(column: IntArray) -> list[int]:
    """The pictures of a row in its order, counted from 1."""
    begins = np.flatnonzero(np.diff(column, prepend=0))
    return [int(number) for number in column[begins] if number]


def body_of(
    request: GenerateRequest, uris: Mapping[Picture, str], placeholder: int, *, in_text: bool, engine: str
) -> dict[str, Sequence[object]]:
    """What a request to `/generate` holds of tokens and pictures. Raises EngineFailed for a row that SGLang would never
    answer."""
    ids, files = [], []
    for row, (tokens, column) in enumerate(zip(request.by_row(), request.picture_by_row(), strict=True)):
        short, numbers = contracted(tokens, column, placeholder, in_text=in_text), shown(column)
        pictures = [request.pictures[number - 1] for number in numbers]
        if (count := short.count(placeholder)) != len(pictures):
            raise EngineFailed(
                f"{engine}: row {row} of {len(request)} (noise key {request.noise_keys[row]}) has {len(pictures)} "
                f"pictures, {', '.join(map(str, pictures)) or 'none'}, but the token that stands for one, "
                f"{placeholder}, {count} times; SGLang would never answer. Rows must not hold this token outside of "
                "pictures: end samples at it (rollout.stop), and leave out prompts that spell it"
            )
        ids.append(short)
        files.append([uris[picture] for picture in pictures])
    # Lists even where a row has none: SGLang takes the first one for the form of all.
    return {"input_ids": ids, "image_data": files}


def write_processor(model: ModelConfig, directory: Path) -> None:
    """Put the files of tokenizer and processor beside the server's config.json. Raises ConfigError if there are
    none."""
    found = sorted(Path(model.path).glob("*processor_config.json")) if model.path else []
    if not found:
        raise ConfigError(
            f"model.pictures={model.pictures!r}: SGLang reads pictures with the processor of the model's directory, "
            f"but model.path={model.path!r} has no preprocessor_config.json; use a directory that has one, or "
            "rollout.engine='transformers'"
        )
    tokenizer = Path(model.tokenizer or model.path)
    if tokenizer.is_dir():
        found += [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).exists()]
    else:
        load_tokenizer(tokenizer=model.tokenizer, path=model.path).save_pretrained(directory)
    for file in found:
        shutil.copy(file, directory)
