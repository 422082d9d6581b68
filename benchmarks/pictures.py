"""Measure an optimizer step on rows with pictures, beside one on as many tokens of text.

python -m benchmarks.pictures --output found/pictures.json
python -m benchmarks.pictures --tower trained --output found/pictures-trained.json
python -m benchmarks.pictures --tiny

The Qwen3-VL-2B shape with random weights on one GPU with 60 GiB, FSDP, bfloat16, recompute = "full". Every row has
2,048 tokens, in rows with pictures 943 of them for one of 1312 x 736. Eight rows show the same picture, as samples
of a prompt do, or each its own. Both sides take turns in one process. The tower's share is the time of its pass by
itself, over the step's; where it is trained, the step has a second one with a backward pass.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from benchmarks.report import Comparison, Number, Report, arguments, finish, in_turns
from benchmarks.samples import GROUP, make_batch, plan_one_step
from benchmarks.steps import CLIP, OPTIMIZER, quick_worker, timed
from corerl.config import TrainConfig
from corerl.data.packing import pack
from corerl.pictures import Picture
from corerl.trainer.worker import Worker
from corerl.types import PICTURE, LossSpec, PackedBatch, SampleBatch, Step
from corerl_testing.harness import Setup

WARM_UP = 2
PLACEHOLDER = 151655
QWEN3_VL_2B: Mapping[str, Any] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "image_token_id": PLACEHOLDER,
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}


@frozen(kw_only=True)
class Size:
    rows: int
    length: int  # tokens of each row
    width: int  # of a picture, in pixels
    height: int
    micro_batch: int  # tokens
    device: str
    precision: str

    def picture_tokens(self, fields: Mapping[str, Any]) -> int:
        side = fields["vision_config"]["patch_size"] * fields["vision_config"]["spatial_merge_size"]
        return self.width // side * (self.height // side)


WHOLE = Size(rows=32, length=2048, width=1312, height=736, micro_batch=16384, device="cuda", precision="bfloat16")
TINY = Size(rows=16, length=48, width=128, height=96, micro_batch=256, device="cpu", precision="float32")


def tiny_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text |= {"rope_parameters": {**fields["text_config"]["rope_parameters"], "mrope_section": [4, 2, 2]}}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    return {
        **fields,
        "text_config": {**fields["text_config"], **text},
        "vision_config": {**fields["vision_config"], **vision, "deepstack_visual_indexes": [0]},
    }


def samples(size: Size, fields: Mapping[str, Any], pictures: int) -> SampleBatch:
    """Rows that show this many different pictures, or none."""
    shown = size.picture_tokens(fields) if pictures else 0
    batch = make_batch(
        np.full(size.rows, size.length),
        prompt=size.picture_tokens(fields) + 2,
        vocab=PLACEHOLDER - 5,  # no token that means something to the model
    )
    if not pictures:
        return batch
    rng = np.random.default_rng(0)
    column = np.zeros((size.rows, size.length), np.int32)
    column[:, 1 : 1 + shown] = 1 + np.arange(size.rows)[:, None] * pictures // size.rows
    tokens = np.where(column.ravel() > 0, PLACEHOLDER, batch.tokens)
    return evolve(
        batch,
        tokens=tokens,
        columns={**batch.columns, PICTURE: column.ravel()},
        pictures=tuple(
            Picture(rng.integers(256, size=(size.height, size.width, 3)).astype(np.uint8)) for _ in range(pictures)
        ),
    )


def packed(size: Size, fields: Mapping[str, Any], pictures: int) -> PackedBatch:
    batch = samples(size, fields, pictures)
    plan = plan_one_step(batch, dp_size=1, tokens_per_micro_batch=size.micro_batch)
    found = pack(batch, plan.share_of(0), sequence_multiple=1)
    return evolve(found, micro_batches=list(found.micro_batches))


def started(size: Size, fields: Mapping[str, Any], tower: str) -> Worker:
    train = TrainConfig(
        tokens_per_micro_batch=size.micro_batch,
        precision=size.precision,  # type: ignore[arg-type]  # one of its words
        recompute="full",
        optimizer=OPTIMIZER,
    )
    return quick_worker(
        Setup(
            backend="fsdp",
            model="",
            fields=fields,
            pictures="vision",
            tower=tower,  # type: ignore[arg-type]  # likewise
            train=train,
            device=size.device,
        )
    )


def measure(tower: str, *, rounds: int, tiny: bool) -> Report:
    size, fields = (TINY, tiny_fields(QWEN3_VL_2B)) if tiny else (WHOLE, QWEN3_VL_2B)
    worker = started(size, fields, tower)
    own, device = worker.backend.tower, worker.backend.device
    assert own is not None
    loss = LossSpec(name="clipped", params={"clip_low": CLIP, "clip_high": CLIP, "entropy_coef": 0.0})
    number = 0

    def step(batch: PackedBatch) -> None:
        nonlocal number
        print(f"step {number + 1}: {len(batch.pictures)} pictures", file=sys.stderr, flush=True)
        worker.train_on(batch=batch, loss=loss, step=Step(optimizer_step=number, rollout_step=number, lr=OPTIMIZER.lr))
        number += 1

    text = packed(size, fields, 0)
    comparisons, numbers = [], []
    for pictures in (size.rows // GROUP, size.rows):
        shown = packed(size, fields, pictures)
        for batch in (text, shown) * WARM_UP:
            step(batch)
        sides = (lambda _, batch=batch: timed(device, partial(step, batch)) for batch in (shown, text))
        ours, other = in_turns(rounds, *sides)
        what = f"a step, tower {tower}, {pictures} pictures in {size.rows} rows"
        comparisons.append(Comparison(what=what, against="as many tokens of text", ours=ours, other=other))
        alone = [timed(device, partial(own.encode, shown.pictures)) for _ in range(rounds)]
        share = statistics.median(alone) / statistics.median(ours)
        numbers += [
            Number(what=f"the tower's pass over {pictures} pictures", values=alone, unit="s"),
            Number(what=f"its share of the step, tower {tower}", values=[100 * share], unit="%"),
        ]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        numbers.append(Number(what=f"memory at the peak, tower {tower}", values=[peak], unit="GiB"))
    worker.shutdown("measured")
    tokens = size.picture_tokens(fields)
    return Report(
        name="pictures",
        size=f"{size.rows} rows of {size.length} tokens, {tokens} of them for a picture of {size.width}x{size.height}",
        comparisons=comparisons,
        numbers=numbers,
    )


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--tower", choices=("frozen", "trained"), default="frozen")
    args = parser.parse_args()
    finish(measure(args.tower, rounds=args.rounds, tiny=args.tiny), args.output)


if __name__ == "__main__":
    main()
