from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.data.packing import StepPlan, pack, plan_forward, plan_part, plan_steps
from corerl.pictures import Picture
from corerl.types import ParallelLayout, SampleBatch
from tests.marked import marked
from tests.pictured import batch_of, random_rows


def three_samples() -> SampleBatch:
    """Of 3, 2 and 4 tokens; read-only, as arrays are that come out of the object store."""
    tokens = np.array([11, 12, 13, 21, 22, 31, 32, 33, 34])
    experts = np.stack([tokens, tokens + 100], axis=1)  # [N, 2]: a column need not be flat
    rows = {"group": [0, 0, 1]}
    batch = marked(".xx", ".x", "..xx", of_rows=rows, advantages=tokens / 10, experts=experts)
    batch = evolve(batch, tokens=tokens, temperature=0.7)
    for array in (batch.tokens, batch.offsets, *batch.columns.values()):
        array.setflags(write=False)
    return batch


def plan() -> StepPlan:
    return StepPlan(
        micro_batches=((np.array([2, 0]), np.array([1])), (np.array([1]), np.array([1]))),
        filler=((False, True), (False, True)),
        scales=np.array([0.25, 0.5, 0.125], dtype=np.float32),
    )


def test_sequences_are_packed_with_positions_of_their_own() -> None:
    packed = pack(three_samples(), plan().shard_of(0), sequence_multiple=1)
    first, _ = packed.micro_batches
    assert packed.count == 2
    assert packed.temperature == 0.7
    assert first.tokens.tolist() == [31, 32, 33, 34, 11, 12, 13]
    assert first.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert first.cu_seqlens.tolist() == [0, 4, 7]
    assert first.lengths.tolist() == [4, 3]
    assert first.rows.tolist() == [2, 0]
    assert first.columns["advantages"].tolist() == pytest.approx([3.1, 3.2, 3.3, 3.4, 1.1, 1.2, 1.3])
    assert first.columns["experts"][:, 1].tolist() == [131, 132, 133, 134, 111, 112, 113]
    assert first.columns["weights"].tolist() == [0.0, 0.0, 0.125, 0.125, 0.0, 0.25, 0.25]
    assert first.columns["weights"].dtype == np.float32


def test_padding_has_token_zero_and_zeros_in_every_column() -> None:
    first, _ = pack(three_samples(), plan().shard_of(0), sequence_multiple=4).micro_batches
    assert first.tokens.tolist() == [31, 32, 33, 34, 11, 12, 13, 0]
    assert first.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert first.cu_seqlens.tolist() == [0, 4, 8]
    assert first.lengths.tolist() == [4, 3]
    assert first.columns["weights"].tolist() == [0.0, 0.0, 0.125, 0.125, 0.0, 0.25, 0.25, 0.0]
    assert first.columns["experts"][-1].tolist() == [0, 0]
    assert not first.columns["loss_mask"][-1]


def test_only_requested_columns_travel_with_the_weights() -> None:
    first, _ = pack(three_samples(), plan().shard_of(0), sequence_multiple=1, columns=("advantages",)).micro_batches
    assert set(first.columns) == {"advantages", "weights"}
    with pytest.raises(ValueError, match="the rollout batch has no column 'values'; it has: advantages, experts"):
        pack(three_samples(), plan().shard_of(0), sequence_multiple=1, columns=("values",))


def test_a_packed_batch_has_the_tokens_of_the_whole_step() -> None:
    samples = three_samples()
    layout = ParallelLayout.data_parallel(rank=0, world_size=2)
    usual = {"tokens_per_micro_batch": 4, "aggregation": "token-mean", "max_tokens": 8}
    (step,) = plan_steps(samples, layout, seed=0, **usual)
    part, _ = plan_part(samples, layout, **usual)
    for planned, tokens in ((step, len(samples.tokens)), (part, 0)):
        packed = [pack(samples, planned.shard_of(dp_rank), sequence_multiple=4) for dp_rank in (0, 1)]
        assert [batch.step_tokens for batch in packed] == [tokens, tokens]


def with_a_picture_for_each_group(groups: int, samples: int) -> SampleBatch:
    """Prompts of 30 tokens that stand for a picture, and responses of all lengths up to 400."""
    rng = np.random.default_rng(0)
    lengths = 30 + rng.integers(1, 400, size=groups * samples)
    group, offsets = np.repeat(np.arange(groups), samples), np.concatenate([[0], np.cumsum(lengths)])
    shown = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) < 30
    return SampleBatch(
        tokens=np.ones(offsets[-1], np.int64),
        offsets=offsets,
        columns={"loss_mask": ~shown, "picture": np.where(shown, 1 + np.repeat(group, lengths), 0).astype(np.int32)},
        row_columns={"group": group},
        pictures=tuple(Picture(np.full((1, 1, 3), number, np.uint8)) for number in range(groups)),
    )


@pytest.mark.parametrize(("groups", "dp_size", "most"), [(64, 8, 68), (32, 8, 32), (16, 8, 32), (2, 16, 16)])
def test_a_picture_goes_to_few_ranks_that_stay_even(groups: int, dp_size: int, most: int) -> None:
    batch = with_a_picture_for_each_group(groups, samples=8)
    text = evolve(batch, columns={"loss_mask": batch.columns["loss_mask"]}, pictures=())
    layout = ParallelLayout.data_parallel(rank=0, world_size=dp_size)
    found, single = (plan_forward(each, layout, tokens_per_micro_batch=1024) for each in (batch, text))
    assert np.array_equal(found.members, np.arange(len(batch)))

    def fullest(plan: StepPlan) -> int:
        shares = [plan.shard_of(dp_rank) for dp_rank in range(dp_size)]
        real = [np.repeat(~share.filler, np.diff(share.offsets)) for share in shares]
        return max(int(batch.lengths[share.rows[own]].sum()) for share, own in zip(shares, real, strict=True))

    assert fullest(found) <= 1.05 * fullest(single)
    encoded = [len(pack(batch, found.shard_of(rank), sequence_multiple=1).pictures) for rank in range(dp_size)]
    assert groups <= sum(encoded) <= most


@pytest.mark.parametrize("seed", range(10))
def test_each_rank_gets_the_pictures_that_its_rows_show(seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), 8)
    rows = [row or [(11, "")] for row in rows]
    batch, groups = batch_of(rows), np.arange(8)
    layout = ParallelLayout(rank=0, world_size=2, dp_rank=0, dp_size=2)
    usual: Any = {"tokens_per_micro_batch": 16, "aggregation": "token-mean", "max_tokens": 9, "seed": 0}
    (step,) = plan_steps(batch.with_row_columns(group=groups), layout, **usual)
    for rank in range(2):
        packed = pack(batch, step.shard_of(rank), sequence_multiple=4, columns=["advantages"])
        shown = set()
        for micro in packed.micro_batches:
            column = micro.columns.get("picture", np.zeros(len(micro.tokens), np.int32))
            for sample, begin, end in zip(micro.rows, micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
                found = [
                    (int(token), packed.pictures[int(number)].id if number else "")
                    for token, number in zip(micro.tokens[begin:end], column[begin:end], strict=True)
                ]
                shown |= {name for _, name in found if name}
                if sample >= 0:
                    assert found[: len(rows[sample])] == rows[sample]
                    assert not any(name for _, name in found[len(rows[sample]) :])
        assert {picture.id for picture in packed.pictures.values()} == shown
