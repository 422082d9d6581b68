"""Pictures as SGLang takes them: files, and in the tokens one placeholder for each.

SGLang (0.5.17) makes of the i-th placeholder as many as its processor counts for the i-th picture. Given any other
number of placeholders than pictures it fails, or never answers.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    from corerl.types import IntArray

# Model types whose pictures SGLang expands in the text: it counts the tokens that end their rows as placeholders, finds
# another number than the processor, and tokenizes what the processor has written.
IN_TEXT = ("mistral3", "pixtral")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)


@contextmanager
def files_of(pictures: Sequence[Picture], directory: Path) -> Iterator[Mapping[Picture, str]]:
    """The address of a file for each picture, which is there until the end of the block. The server runs on the same
    machine: nothing is gained by compressing pictures, and requests stay small however many rows show one."""
    if not pictures:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="pictures-", dir=directory) as own:
        files = {picture: Path(own) / f"{number}.ppm" for number, picture in enumerate(pictures)}
        for picture, file in files.items():
            file.write_bytes(b"P6 %d %d 255\n" % picture.size + picture.pixels.tobytes())
        yield {picture: file.as_uri() for picture, file in files.items()}


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
        places = np.flatnonzero(tokens[begin:end] == placeholder)
        if column[begin] and len(places):
            keep[begin + places[0] + 1 : end + in_text] = False
    return [int(token) for token in tokens[keep]]


def shown(column: IntArray) -> list[int]:
    """The pictures of a row in its order, counted from 1."""
    begins = np.flatnonzero(np.diff(column, prepend=0))
    return [int(number) for number in column[begins] if number]


def body_of(
    request: GenerateRequest, files: Mapping[Picture, str], placeholder: int, *, in_text: bool, engine: str
) -> dict[str, Sequence[object]]:
    """What a request to `/generate` holds of tokens and pictures. Raises EngineFailed for a row that SGLang might never
    answer."""
    ids, shown_files = [], []
    for row, (tokens, column) in enumerate(zip(request.by_row(), request.picture_by_row(), strict=True)):
        short, numbers = contracted(tokens, column, placeholder, in_text=in_text), shown(column)
        pictures = [request.pictures[number - 1] for number in numbers]
        if (count := short.count(placeholder)) != len(pictures):
            raise EngineFailed(
                f"{engine}: the row of noise key {request.noise_keys[row]} has {len(pictures)} pictures, "
                f"{', '.join(map(str, pictures)) or 'none'}, but the token that stands for one, "
                f"{placeholder}, {count} times; SGLang might never answer. Rows must not hold this token outside of "
                "pictures: end samples at it (rollout.stop), and leave out prompts that spell it"
            )
        ids.append(short)
        shown_files.append([files[picture] for picture in pictures])
    # Lists even where a row has none: SGLang takes the first one for the form of all.
    return {"input_ids": ids, "image_data": shown_files}


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
