"""What a step takes ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from corerl_fsdp.step import with_last


@pytest.mark.parametrize("count", range(4))
def test_the_last_item_is_known_and_no_more_than_one_is_taken_ahead(count: int) -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(count):
            taken.append(item)
            yield item

    for item, last in with_last(items()):
        assert last == (item == count - 1)
        assert len(taken) == min(item + 2, count)
    assert taken == list(range(count))
