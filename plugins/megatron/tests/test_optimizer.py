from __future__ import annotations

from attrs import evolve

from corerl_testing import RankPool, Runs
from plugins.megatron.tests import ranks


def test_copies_whose_norms_differ_in_a_bit_take_one(runs: Runs, rank_pool: RankPool) -> None:
    setup = evolve(runs.setup("megatron", "qwen3"), options={"distributed_optimizer": False})
    larger = 1.0 + 2**-52
    assert rank_pool.run(ranks.norm_of_a_step, setup, [1.0, larger]) == [larger, larger]
