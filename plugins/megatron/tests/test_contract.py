"""What ranks of a layout hold beyond what the conformance suite asks for."""

from __future__ import annotations

from attrs import evolve

from corerl_testing import RankPool, Runs
from plugins.megatron.tests import ranks


def test_a_rank_without_memory_says_alone_what_it_holds(runs: Runs, rank_pool: RankPool) -> None:
    setup = evolve(
        runs.setup("megatron", "qwen3"),
        options={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket": 4096},
    )
    told, norms = zip(*rank_pool.run(ranks.explained_alone, setup, 1), strict=True)
    assert told[0] == "" and "1 MiB is free; in use: tensors of param: " in told[1]
    assert norms == tuple(each for _, each in rank_pool.run(ranks.explained_alone, setup, -1))


def test_the_vocabularys_padding_stays_zero(runs: Runs, rank_pool: RankPool) -> None:
    setup = evolve(runs.setup("megatron", "qwen3"), options={"tensor_parallel": 2})
    first, second = rank_pool.run(ranks.padding_after_steps, setup, 3)
    assert first == []
    assert second == [(1, 0.0), (1, 0.0)]  # of embedding and head: 97 tokens on two ranks
