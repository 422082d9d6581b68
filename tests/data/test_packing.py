from typing import Any

import numpy as np
import pytest

from corerl.data.packing import StepPlan, pack, plan_part, plan_steps
from corerl.types import ParallelLayout, SampleBatch
from tests.pictured import batch_of, random_rows


def three_samples() -> SampleBatch:
    """Of 3, 2 and 4 tokens; read-only, as arrays are that come out of the object store."""
    tokens = np.array([11, 12, 13, 21, 22, 31, 32, 33, 34])
    batch = SampleBatch(
        tokens=tokens,
        offsets=np.array([0, 3, 5, 9]),
        columns={
            "loss_mask": np.array([False, True, True, False, True, False, False, True, True]),
            "advantages": tokens.astype(np.float32) / 10,
            "experts": np.stack([tokens, tokens + 100], axis=1),  # [N, 2]: a column need not be flat
        },
        row_columns={"group": np.array([0, 0, 1])},
        temperature=0.7,
    )
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
    packed = pack(three_samples(), plan().share(0), sequence_multiple=1)
    first, _ = packed.micro_batches
    assert packed.count == 2
    assert packed.temperature == 0.7
    assert first.tokens.tolist() == [31, 32, 33, 34, 11, 12, 13]
    assert first.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert first.cu_seqlens.tolist() == [0, 4, 7]
    assert first.lengths.tolist() == [4, 3]
    assert first.samples.tolist() == [2, 0]
    assert first.columns["advantages"].tolist() == pytest.approx([3.1, 3.2, 3.3, 3.4, 1.1, 1.2, 1.3])
    assert first.columns["experts"][:, 1].tolist() == [131, 132, 133, 134, 111, 112, 113]
    assert first.columns["weights"].tolist() == [0.0, 0.0, 0.125, 0.125, 0.0, 0.25, 0.25]
    assert first.columns["weights"].dtype == np.float32


def test_padding_has_token_zero_and_zeros_in_every_column() -> None:
    first, _ = pack(three_samples(), plan().share(0), sequence_multiple=4).micro_batches
    assert first.tokens.tolist() == [31, 32, 33, 34, 11, 12, 13, 0]
    assert first.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert first.cu_seqlens.tolist() == [0, 4, 8]
    assert first.lengths.tolist() == [4, 3]
    assert first.columns["weights"].tolist() == [0.0, 0.0, 0.125, 0.125, 0.0, 0.25, 0.25, 0.0]
    assert first.columns["experts"][-1].tolist() == [0, 0]
    assert not first.columns["loss_mask"][-1]


def test_a_filler_keeps_its_tokens_and_counts_for_nothing() -> None:
    _, filler = pack(three_samples(), plan().share(0), sequence_multiple=1).micro_batches
    assert filler.tokens.tolist() == [21, 22]
    assert filler.samples.tolist() == [-1]
    assert filler.columns["weights"].tolist() == [0.0, 0.0]
    assert filler.columns["loss_mask"].tolist() == [False, False]


def test_only_requested_columns_travel_with_the_weights() -> None:
    first, _ = pack(three_samples(), plan().share(0), sequence_multiple=1, columns=("advantages",)).micro_batches
    assert set(first.columns) == {"advantages", "weights"}
    with pytest.raises(ValueError, match="the rollout batch has no column 'values'; it has: advantages, experts"):
        pack(three_samples(), plan().share(0), sequence_multiple=1, columns=("values",))


def test_a_packed_batch_has_the_tokens_of_the_whole_step() -> None:
    samples = three_samples()
    layout = ParallelLayout.data_parallel(rank=0, world_size=2)
    usual = {"tokens_per_micro_batch": 4, "aggregation": "token-mean", "max_tokens": 8}
    (step,) = plan_steps(samples, layout, seed=0, **usual)
    part, _ = plan_part(samples, layout, **usual)
    for planned, tokens in ((step, len(samples.tokens)), (part, 0)):
        packed = [pack(samples, planned.share(dp_rank), sequence_multiple=4) for dp_rank in (0, 1)]
        assert [batch.step_tokens for batch in packed] == [tokens, tokens]


@pytest.mark.parametrize("seed", range(10))
def test_each_rank_gets_the_pictures_that_its_rows_show(seed: int) -> None:
    rows = random_rows(np.random.default_rng(seed), 8)
    rows = [row or [(11, "")] for row in rows]
    batch, groups = batch_of(rows), np.arange(8)
    layout = ParallelLayout(rank=0, world_size=2, dp_rank=0, dp_size=2)
    usual: Any = {"tokens_per_micro_batch": 16, "aggregation": "token-mean", "max_tokens": 9, "seed": 0}
    (step,) = plan_steps(batch.with_row_columns(group=groups), layout, **usual)
    for rank in range(2):
        packed = pack(batch, step.share(rank), sequence_multiple=4, columns=["advantages"])
        shown = set()
        for micro in packed.micro_batches:
            column = micro.columns.get("picture", np.zeros(len(micro.tokens), np.int32))
            for sample, begin, end in zip(micro.samples, micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
                found = [
                    (int(token), packed.pictures[int(number)].id if number else "")
                    for token, number in zip(micro.tokens[begin:end], column[begin:end], strict=True)
                ]
                shown |= {name for _, name in found if name}
                if sample >= 0:
                    assert found[: len(rows[sample])] == rows[sample]
                    assert not any(name for _, name in found[len(rows[sample]) :])
        assert {picture.id for picture in packed.pictures.values()} == shown
