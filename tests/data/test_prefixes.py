from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from corerl.data.packing import pack, plan_forward, plan_steps
from corerl.data.prefixes import groups_in_order, in_trees
from corerl.types import ParallelLayout, SampleBatch
from corerl_testing.harness import make_branches
from tests.marked import marked


def rows(*tokens: list[int], groups: list[int] | None = None) -> SampleBatch:
    batch = marked(*("x" * len(each) for each in tokens), of_rows={"group": groups or [0] * len(tokens)})
    return evolve(batch, tokens=np.concatenate(tokens))


def layout(dp_size: int = 1) -> ParallelLayout:
    return ParallelLayout.data_parallel(rank=0, world_size=dp_size, shares_prefixes=True)


def nodes(batch: SampleBatch, members: np.ndarray) -> int:
    """Distinct beginnings of these rows: the tokens of their tree."""
    beginnings = set()
    for row in members:
        tokens = batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].tolist()
        beginnings |= {(batch.row_columns["group"][row], *tokens[:end]) for end in range(1, len(tokens) + 1)}
    return len(beginnings)


@pytest.mark.parametrize("seed", range(5))
def test_trees_have_each_distinct_beginning_of_rows_once(seed: int) -> None:
    batch = make_branches(seed)
    order, lengths, prefixes = groups_in_order(batch, np.arange(len(batch)))
    trees = in_trees(order, lengths, prefixes, tokens=1000, rows=99)
    assert [sorted(each) for each in trees.members] == [list(range(first, first + 5)) for first in (0, 5, 10)]
    assert trees.sizes.tolist() == [nodes(batch, each) for each in trees.members]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_every_row_is_packed_once_within_the_budget(dp_size: int) -> None:
    batch, budget = make_branches(3, groups=8), 60
    (plan,) = plan_steps(
        batch, layout(dp_size), tokens_per_micro_batch=budget, aggregation="token-mean", max_tokens=1, seed=0
    )
    assert plan.members.tolist() == list(range(len(batch)))
    for dp_rank in range(dp_size):
        for micro in pack(batch, plan.shard_of(dp_rank), sequence_multiple=1).micro_batches:
            assert micro.prefix_lengths is not None
            assert len(micro.tokens) - micro.prefix_lengths.sum() <= budget
            if micro.rows[0] >= 0:
                assert len(micro.tokens) - micro.prefix_lengths.sum() == nodes(batch, micro.rows)


def test_one_group_is_cut_for_two_ranks() -> None:
    batch = rows(*([*range(100), 200 + each] for each in range(16)))
    plan = plan_forward(batch, layout(2), tokens_per_micro_batch=1000)
    loads = [sum(nodes(batch, each) for each in members) for members in plan.micro_batches]
    assert max(loads) <= 110  # a prefix of 100 and half of the 16 answers of 1, nearly; uncut it would be 116


def test_few_tokens_in_common_are_not_shared() -> None:
    batch = rows([7, *range(100, 150)], [7, *range(200, 250)])
    (micro,) = pack(
        batch, plan_forward(batch, layout(), tokens_per_micro_batch=200).shard_of(0), sequence_multiple=1
    ).micro_batches
    assert micro.prefix_lengths is not None and micro.prefix_lengths.tolist() == [0, 0]
