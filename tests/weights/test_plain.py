"""Data that ranks tell each other, against what each of them has."""

from __future__ import annotations

from typing import Any

import pytest

from corerl_testing.pool import RankPool
from tests.weights import ranks


@pytest.mark.parametrize(
    "data",
    [
        [None, None],
        [[1, [2.5, "é\x00"], {"a": True}], []],
        ["short", "a" * 100_000],
        [{"n": 2**62}, ["x"] * 1000],
    ],
)
def test_every_rank_has_what_all_said_in_their_order(rank_pool: RankPool, data: list[Any]) -> None:
    assert rank_pool.run(ranks.told_to_all, data) == [data, data]


def test_tuples_arrive_as_lists(rank_pool: RankPool) -> None:
    assert rank_pool.run(ranks.told_to_all, [(1, (2,)), ()]) == [[[1, [2]], []]] * 2
