"""Prompts with pictures as a run makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen

from corerl.config import ModelConfig
from corerl.engines import GenerateRequest, SamplingParams
from corerl.models import build_on_meta, hf_boxes, hf_config, load_tokenizer, named_weights
from corerl.pictures import Picture
from corerl.rollout import expand
from corerl.types import IntArray, all_shown, offsets_of
from corerl_vision.reader import VisionReader
from corerl_vision.shapes import png
from corerl_vision.spec import VisionOptions


@frozen(kw_only=True)
class Row:
    """One prompt."""

    ids: Sequence[int]  # as the template writes it: one token a picture
    tokens: IntArray  # [n]
    column: IntArray  # [n] 1 + the index of the picture
    pictures: Sequence[Picture]


def squares(width: int, height: int, *, seed: int) -> bytes:
    """A file of squares of 8 x 8 pixels in random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return png(np.repeat(np.repeat(colours, 8, axis=0), 8, axis=1))


def rows_of(model: ModelConfig, prompts: Sequence[tuple[str, Sequence[bytes]]]) -> list[Row]:
    """Of texts with a mark <image> for each of their files."""
    tokenizer = load_tokenizer(tokenizer=model.tokenizer, path=model.path)
    reader = VisionReader(VisionOptions(), model, tokenizer)
    rows = []
    for text, files in prompts:
        marked, found = reader.find({"images": list(files)}, f"{tokenizer.bos_token}{text}", root="")
        ids = tokenizer(marked, add_special_tokens=False)["input_ids"]
        pictures = [reader.read(each) for each in found]
        tokens, column = expand(ids, pictures, reader)
        rows.append(Row(ids=ids, tokens=tokens, column=column, pictures=pictures))
    return rows


def request_of(rows: Sequence[Row], params: SamplingParams) -> GenerateRequest:
    column, pictures = all_shown([(row.column, row.pictures) for row in rows])
    return GenerateRequest(
        tokens=np.concatenate([row.tokens for row in rows]),
        offsets=offsets_of([len(row.tokens) for row in rows]),
        noise_keys=np.arange(len(rows)),
        params=params,
        picture=column,
        pictures=pictures,
    )


def tensors_of(own: Any, model: ModelConfig) -> dict[str, torch.Tensor]:
    """What a trainer sends of this model's weights, by the names of files that it would write."""
    built = build_on_meta(hf_config(model), dtype=torch.float32, attention="eager", pictures=True)
    weights = named_weights(own)
    return {box.name: box.view(weights[name].data) for name, boxes in hf_boxes(built).items() for box in boxes}
