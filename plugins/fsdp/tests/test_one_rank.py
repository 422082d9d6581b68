"""One buffer for a reduction's input and output on one rank: fewer copies, and the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import evolve

from corerl_fsdp.one_rank import OneRankReduce
from corerl_testing import PACKINGS, Runs, different, together
from corerl_testing.scenarios import training
from plugins.fsdp.tests import ranks

CPU = torch.device("cpu")


def test_input_and_output_of_each_reduction_are_one_tensor() -> None:
    reduce = OneRankReduce()
    pairs = [[reduce.allocate((3,), dtype=torch.float32, device=CPU) for _ in range(2)] for _ in range(2)]
    assert all(first is second for first, second in pairs)
    assert pairs[0][0].data_ptr() != pairs[1][0].data_ptr()  # the first are gradients by then


def test_a_reduction_that_raised_leaves_no_tensor_to_the_next() -> None:
    reduce = OneRankReduce()
    reduce.allocate((3,), dtype=torch.float32, device=CPU)  # and no output
    first = reduce.allocate((3,), dtype=torch.float32, device=CPU)
    assert reduce.allocate((3,), dtype=torch.float32, device=CPU) is first
    assert reduce.allocate((3,), dtype=torch.float32, device=CPU) is not first
    held = reduce.allocate((3,), dtype=torch.float32, device=CPU)  # again without an output, but not let go of
    assert reduce.allocate((4,), dtype=torch.float32, device=CPU).shape == (4,) and held.shape == (3,)


def test_one_rank_reduces_in_one_buffer_and_two_do_not(runs: Runs) -> None:
    setup = evolve(runs.setup("fsdp", "qwen3"), options={"sync": "every"})
    ((reductions, in_one_buffer),) = runs.rank_sets[1].run(ranks.reductions_in_one_buffer, setup)
    assert reductions == in_one_buffer > 0
    assert [count for _, count in runs.rank_sets[2].run(ranks.reductions_in_one_buffer, setup)] == [0, 0]


@pytest.mark.parametrize("options", [{}, {"sync": "every"}, {"offload": "parameters"}], ids=str)
def test_one_buffer_and_one_reduction_change_no_bit(runs: Runs, options: Mapping[str, Any]) -> None:
    found = runs.train(1, evolve(runs.setup("fsdp", "qwen3-moe"), options=options), range(3))
    plain = evolve(runs.setup("fsdp", "qwen3-moe"), options={"sync": "every"})
    wanted = together(runs.rank_sets[1].run(ranks.with_two_buffers, training.train_steps, plain, [0, 1, 2]))
    assert found.losses == wanted.losses
    assert different(found.state, wanted.state) == []


def test_later_calls_add_to_gradients_as_they_come(runs: Runs) -> None:
    """Held apart until its end, they would take as much memory again."""
    setup = runs.setup("fsdp", "qwen3", PACKINGS["one by one"])
    ((units, micro_batches, reductions),) = runs.rank_sets[1].run(ranks.reductions_of_two_calls, setup)
    assert micro_batches[1] > 1
    assert reductions == [units, units * micro_batches[1]]
