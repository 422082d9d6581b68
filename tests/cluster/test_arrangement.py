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


@pytest.mark.parametrize(
    ("ranks", "engines", "own_devices", "engine_places", "bundles"),
    [
        (4, 2, [], (0, 2), 4),
        (6, 2, [], (0, 2), 6),
        (8, 2, [], (0, 4), 8),
        (3, 1, [], (0,), 3),
        (1, 2, [], (0, 2), 4),
        (3, 2, ["engines"], (3, 5), 7),
    ],
)
def test_a_wide_process_shares_several_adjacent_bundles(
    ranks: int, engines: int, own_devices: list[str], engine_places: tuple[int, ...], bundles: int
) -> None:
    groups = {"actor": ranks, "engines": engines}
    placement = arrange(groups, own_devices=own_devices, widths={"engines": 2, "actor": 1}, cpus=1.0, gpus=1.0)
    assert (placement.places["engines"], placement.bundles) == (engine_places, bundles)
    taken = [0.0] * bundles
    for name, places in placement.places.items():
        for place in places:
            assert len(placement.taken(name, place)) == (2 if name == "engines" else 1)
            for bundle in placement.taken(name, place):
                taken[bundle] += placement.share(bundle)
    assert taken == pytest.approx([1.0] * bundles)
