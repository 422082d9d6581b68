"""Numbers are compared with plain Python loops over the same samples."""

from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.data.packing import StepPlan, count_loss_tokens, plan_forward, plan_part, plan_steps
from corerl.errors import DataError
from corerl.types import ParallelLayout, SampleBatch
from tests.marked import marked

DEFAULTS: dict[str, Any] = {
    "layout": ParallelLayout.data_parallel(rank=0, world_size=2),
    "tokens_per_micro_batch": 32,
    "aggregation": "token-mean",
    "max_tokens": 16,
    "seed": 3,
}


def layout(dp_size: int, **multiples: Any) -> ParallelLayout:
    return evolve(ParallelLayout.data_parallel(rank=0, world_size=dp_size), **multiples)


def batch_of(lengths: list[int], *, samples_per_group: int = 1, prompt: int = 1) -> SampleBatch:
    """Samples whose first `prompt` tokens are not the policy's."""
    rows = ["." * min(prompt, length) + "x" * (length - prompt) for length in lengths]
    return marked(*rows, of_rows={"group": np.arange(len(lengths)) // samples_per_group})


def random_batch(samples: int, *, samples_per_group: int = 1) -> SampleBatch:
    lengths = np.random.default_rng(0).integers(2, 30, samples).tolist()
    return batch_of(lengths, samples_per_group=samples_per_group)


def real_samples(plan: StepPlan) -> list[int]:
    return sorted(
        int(sample)
        for rank, filler in zip(plan.micro_batches, plan.filler, strict=True)
        for members, fills in zip(rank, filler, strict=True)
        if not fills
        for sample in members
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 12] * 5),
        # Two of three episodes have loss tokens, the first one in two of its three samples.
        ("sequence-mean", [1 / (2 * 2 * 2), 1 / (2 * 2 * 5), 0, 1 / (2 * 5), 0]),
        ("constant-length", [1 / (3 * 16), 1 / (3 * 16), 0, 1 / (3 * 16), 0]),
    ],
)
def test_an_episode_counts_as_one_sample_of_the_step(aggregation: str, expected: list[float]) -> None:
    batch = batch_of([3, 6, 1, 6, 1]).with_row_columns(episode=np.array([4, 4, 4, 0, 9]))
    (step,) = plan_steps(batch, **{**DEFAULTS, "aggregation": aggregation})
    assert step.scales.tolist() == pytest.approx(expected)


PART: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if name != "seed"}


@pytest.mark.parametrize("unit", [1.0, 37.0])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant-length"])
def test_parts_of_a_step_together_have_its_weights(aggregation: str, unit: float) -> None:
    rows = np.repeat(np.arange(12), np.random.default_rng(1).integers(1, 5, 12))  # of each episode
    lengths = np.random.default_rng(2).integers(1, 30, len(rows))  # of one token, there is none with a loss
    batch = batch_of(lengths.tolist()).with_row_columns(episode=rows, group=rows // 3)
    (step,) = plan_steps(batch, **{**DEFAULTS, "aggregation": aggregation})
    scales, denominator = np.zeros(len(batch)), 0.0
    for groups in ([2], [0, 3], [1]):
        members = np.flatnonzero(np.isin(batch.row_columns["group"], groups))
        plan, count = plan_part(batch.take_rows(members), **{**PART, "aggregation": aggregation, "unit": unit})
        assert real_samples(plan) == list(range(len(members)))
        scales[members], denominator = plan.scales, denominator + count
    assert (scales * unit / denominator).tolist() == pytest.approx(step.scales.tolist(), rel=1e-6)


def test_rectangular_micro_batches_are_as_few_as_the_budget_allows() -> None:
    ranks = layout(3, rectangular=True, sequence_multiple=2, micro_batch_multiple=2)
    batch = random_batch(60)
    padded = [-(-int(length) // 2) * 2 for length in batch.lengths]
    (step,) = plan_steps(batch, **{**DEFAULTS, "layout": ranks, "tokens_per_micro_batch": 64})
    for plan in (plan_forward(batch, ranks, tokens_per_micro_batch=64), step):
        assert real_samples(plan) == list(range(60))
        assert len({len(rank) for rank in plan.micro_batches}) == 1 and len(plan.micro_batches[0]) % 2 == 0
        for rank in plan.micro_batches:
            for members in rank:
                assert len(members) * max(padded[sample] for sample in members) <= 64

    @cache
    def fewest(lengths: tuple[int, ...], budget: int) -> int:
        """Of all ways to choose the companions of the longest."""
        if not lengths:
            return 0
        longest, *others = lengths
        room = max(budget // longest, 1) - 1
        chosen = (
            set(each) for size in range(min(room, len(others)) + 1) for each in combinations(range(len(others)), size)
        )
        left = {tuple(length for at, length in enumerate(others) if at not in taken) for taken in chosen}
        return 1 + min(fewest(each, budget) for each in left)

    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths, budget = sorted(rng.integers(1, 25, 8).tolist(), reverse=True), int(rng.integers(5, 80))
        plan = plan_forward(batch_of(lengths), layout(1, rectangular=True), tokens_per_micro_batch=budget)
        assert len(plan.micro_batches[0]) == fewest(tuple(lengths), budget)


def test_packing_equals_first_fit_decreasing_sample_by_sample() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        lengths, budget = rng.integers(1, 25, 40).tolist(), int(rng.integers(5, 50))
        plan = plan_forward(batch_of(lengths), layout(1), tokens_per_micro_batch=budget)
        bins: list[list[int]] = []
        for sample in sorted(range(40), key=lambda sample: (-lengths[sample], sample)):
            fitting = (held for held in bins if sum(lengths[s] for s in held) + lengths[sample] <= budget)
            found = next(fitting, None)
            if found is None:
                bins.append([sample])
            else:
                found.append(sample)
        assert [sorted(members.tolist()) for members in plan.micro_batches[0]] == [sorted(held) for held in bins]


def test_ranks_without_samples_get_the_shortest_as_filler() -> None:
    plan = plan_forward(batch_of([9, 4]), layout(3, micro_batch_multiple=2), tokens_per_micro_batch=16)
    assert plan.filler == ((False, True), (False, True), (True, True))
    assert [[members.tolist() for members in rank] for rank in plan.micro_batches] == [
        [[0], [1]],
        [[1], [1]],
        [[1], [1]],
    ]


def test_loss_tokens_are_counted_per_sample() -> None:
    assert count_loss_tokens(marked("", "x.x", "", ".x", "")).tolist() == [0, 2, 0, 1, 0]


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="the rollout batch has no samples"):
        plan_forward(batch_of([]), layout(1), tokens_per_micro_batch=8)


def test_a_share_indexes_the_samples_that_a_rank_is_given() -> None:
    plan = StepPlan(
        micro_batches=((np.array([4, 1]), np.array([7])), (np.array([2]), np.array([1])), (np.array([9]),) * 2),
        filler=((False, False), (False, True), (False, True)),
        scales=np.arange(10, dtype=np.float32),
    )
    assert (plan.rows([1]).tolist(), plan.rows({0, 1}).tolist()) == ([1, 2], [1, 2, 4, 7])
    whole, cut = plan.shard_of(0), plan.shard_of(0, plan.rows({0, 1}))
    assert (whole.given_rows.tolist(), cut.given_rows.tolist()) == ([4, 1, 7], [2, 0, 3])
    for share in (whole, cut):
        assert (share.rows.tolist(), share.scales.tolist()) == ([4, 1, 7], [4.0, 1.0, 7.0])
        assert (share.offsets.tolist(), share.filler.tolist()) == ([0, 2, 3], [False, False])
    assert plan.shard_of(1).filler.tolist() == [False, True]
