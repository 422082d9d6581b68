from __future__ import annotations

from collections.abc import Sequence

import pytest

from corerl.engines import prefix_router
from corerl.engines.base import Generation
from corerl.engines.prefix_router import PrefixRouter
from tests.engines.services import generation_of, request_of
from tests.pictured import PICTURES
from tests.pictured import request_of as pictured_request


def shared(shares: PrefixRouter, rows: Sequence[Sequence[int]], replicas: Sequence[int]) -> dict[int, list[int]]:
    return {replica: each.tolist() for replica, each in shares.divide(request_of(rows), replicas).items()}


@pytest.mark.parametrize(
    ("prompts", "samples", "wanted"),
    [
        (6, 4, [8, 8, 8]),
        (4, 8, [8, 16, 8]),  # ideally 10, 11, 11
        (5, 4, [8, 4, 8]),  # ideally 6, 7, 7
        (1, 7, [3, 2, 2]),  # one prompt has more rows than a share: it is parted
        (2, 1, [1, 1]),
    ],
)
def test_shares_are_even_and_a_prompts_samples_stay_together(prompts: int, samples: int, wanted: list[int]) -> None:
    rows = [[3, prompt, 7] for prompt in range(prompts) for _ in range(samples)]
    found = shared(PrefixRouter(), rows, [0, 2, 5])
    assert sorted(row for each in found.values() for row in each) == list(range(len(rows)))
    assert [len(each) for each in found.values()] == wanted
    if samples <= len(rows) // 3:
        parts = [{rows[row][1] for row in each} for each in found.values()]
        assert sum(map(len, parts)) == prompts  # none is in two


def test_beginnings_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "REMEMBERED", 4)
    shares = PrefixRouter()
    shares.remember(1, request_of([[1, 1], [2, 2]]), generation_of([[5], [6]]))
    assert shared(shares, [[1, 1, 5, 9]], [0, 1]) == {1: [0]}
    shares.remember(0, request_of([[3, 3]]), generation_of([[7]]))
    with shares.in_progress({1: 1}):
        assert shared(shares, [[1, 1, 5, 9]], [0, 1]) == {0: [0]}  # to who has least


def test_rows_of_one_picture_go_where_it_was_read() -> None:
    shares = PrefixRouter()
    first, second = list(PICTURES)[:2]
    rows = [[(7, ""), (5, name), (5, name), (9, "")] for name in (first, second)]  # the same tokens
    for replica, row in enumerate(rows):
        request = pictured_request([row])
        shares.remember(replica, request, Generation.nothing(request))
    assert {
        replica: each.tolist() for replica, each in shares.divide(pictured_request(rows[::-1]), [0, 1]).items()
    } == {0: [1], 1: [0]}
