"""Who sits where, as plain arithmetic."""

from __future__ import annotations

import pytest

from corerl.cluster.arrangement import arrange


@pytest.mark.parametrize(
    ("ranks", "engines", "bundles", "rank_places", "engine_places"),
    [
        (2, 2, 2, (0, 1), (0, 1)),
        (4, 2, 4, (0, 1, 2, 3), (0, 2)),
        (3, 2, 3, (0, 1, 2), (0, 1)),
        (1, 3, 3, (0,), (0, 1, 2)),
        (2, 4, 4, (0, 2), (0, 1, 2, 3)),
        (2, 0, 2, (0, 1), ()),
    ],
)
def test_groups_share_bundles_and_are_spread_evenly_over_them(
    ranks: int, engines: int, bundles: int, rank_places: tuple[int, ...], engine_places: tuple[int, ...]
) -> None:
    placement = arrange({"actor": ranks, "engines": engines})
    assert placement.places == {"actor": rank_places, "engines": engine_places}
    assert placement.bundles == bundles
