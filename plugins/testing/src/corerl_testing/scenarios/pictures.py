"""Train on rows that show pictures, of a tiny model whose tower is built from fields alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve

from corerl.config import ModelConfig
from corerl.pictures import Picture
from corerl.plugin.pictures import picture_inputs
from corerl.types import PICTURE, SampleBatch, TrainResult, offsets_of
from corerl_testing.harness import TEMPERATURES, Setup, make_samples, start, step_at, train
from corerl_testing.scenarios.training import Trained, taken

BEGIN, END, OTHER = 7, 8, 9  # tokens before and after a picture, and any other
MERGED = 2  # patches in each direction that give one feature
FIELDS: Mapping[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "patch_size": 4,
        "depth": 1,
        "num_heads": 2,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    },
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
SIZES = ((16, 24), (24, 8))  # of the pictures that samples show, in pixels
# Which pictures each row shows, in groups of two, as `make_samples` has them. The placeholder that ends the last row is
# sampled, and stands for none.
SHOWN = ((0,), (0,), (), (), (1, 0), (1,), (), ())


def samples_with_pictures(number: int, *, shown: Sequence[Sequence[int]] = SHOWN) -> SampleBatch:
    """Samples of which each shows these pictures before its other tokens."""
    inputs = picture_inputs(ModelConfig(config=FIELDS, pictures="vision", tower="trained"))
    assert inputs is not None
    rng = np.random.default_rng(number)
    pictures = tuple(Picture(rng.integers(256, size=(*size, 3)).astype(np.uint8)) for size in SIZES)
    patch = FIELDS["vision_config"]["patch_size"] * MERGED
    counts = [height // patch * (width // patch) for height, width in SIZES]
    text = make_samples(1000 + number, samples=len(shown), temperature=TEMPERATURES[number % len(TEMPERATURES)])
    tokens: list[int] = []
    column: list[int] = []
    places: list[int] = []
    lengths: list[int] = []
    for first, end, own in zip(text.offsets[:-1], text.offsets[1:], shown, strict=True):
        before = len(tokens)
        for index in own:
            tokens += [BEGIN, *[inputs.placeholder] * counts[index], END]
            column += [0, *[index + 1] * counts[index], 0]
        places += [-1] * (len(tokens) - before) + list(range(first, end))
        tokens += np.where(text.tokens[first:end] == inputs.placeholder, OTHER, text.tokens[first:end]).tolist()
        column += [0] * int(end - first)
        lengths.append(len(tokens) - before)
    tokens[-1] = inputs.placeholder
    of_text = np.array(places)
    columns = {
        name: np.where(of_text < 0, 0, values[of_text]).astype(values.dtype) for name, values in text.columns.items()
    }
    return evolve(
        text,
        tokens=np.array(tokens),
        offsets=offsets_of(lengths),
        columns={**columns, PICTURE: np.array(column, dtype=np.int32)},
        pictures=pictures,
    )


def train_on_pictures(
    setup: Setup,
    numbers: Sequence[int],
    shown: Sequence[Sequence[int]] = SHOWN,
    resume: str = "",
    save_after: int = -1,
    save_to: str = "",
) -> Trained:
    """Train steps `numbers`; after step `save_after`, save the rank's part of a checkpoint to `save_to`."""
    worker, init = start(setup, resume=resume)

    def take(number: int) -> TrainResult:
        result = train(worker, setup, number, samples=samples_with_pictures(number, shown=shown))
        if number == save_after:
            worker.save(save_to, step_at(number + 1), False)
        return result

    return taken(worker, init, numbers, take)
