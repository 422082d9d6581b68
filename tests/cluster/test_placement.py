"""Who sits where, as plain arithmetic; Ray is asked in test_group.py."""

from __future__ import annotations

import pytest

from corerl.cluster.placement import arrange, physical_order


@pytest.mark.parametrize(
    ("ranks", "engines", "bundles", "engine_seats", "shares"),
    [
        (2, 2, 2, (0, 1), [1 / 2, 1 / 2]),
        (4, 2, 4, (0, 2), [1 / 2, 1, 1 / 2, 1]),  # spread evenly over the ranks
        (3, 2, 3, (0, 1), [1 / 2, 1 / 2, 1]),
        (1, 3, 3, (0, 1, 2), [1 / 2, 1, 1]),  # more engines than ranks have bundles of their own
        (2, 0, 2, (), [1, 1]),
    ],
)
def test_colocated_engines_share_the_ranks_bundles(
    ranks: int, engines: int, bundles: int, engine_seats: tuple[int, ...], shares: list[float]
) -> None:
    seating = arrange(ranks=ranks, engines=engines, placement="colocated", cpus=1.0, gpus=0.0)
    assert seating.ranks == tuple(range(ranks))
    assert seating.engines == engine_seats
    assert seating.bundles == bundles
    assert [seating.share(bundle) for bundle in range(bundles)] == shares


def test_disaggregated_engines_have_bundles_of_their_own() -> None:
    seating = arrange(ranks=2, engines=3, placement="disaggregated", cpus=1.0, gpus=0.0)
    assert seating.ranks == (0, 1)
    assert seating.engines == (2, 3, 4)
    assert seating.bundles == 5
    assert [seating.share(bundle) for bundle in range(5)] == [1.0] * 5


def test_a_bundle_is_what_one_process_takes() -> None:
    seating = arrange(ranks=1, engines=1, placement="colocated", cpus=4.0, gpus=2.0)
    assert (seating.cpus_per_bundle, seating.gpus_per_bundle) == (4.0, 2.0)


def test_no_bundle_is_given_away_more_than_once() -> None:
    for ranks in range(1, 9):
        for engines in range(9):
            seating = arrange(ranks=ranks, engines=engines, placement="colocated", cpus=1.0, gpus=1.0)
            taken = [0.0] * seating.bundles
            for bundle in (*seating.ranks, *seating.engines):
                taken[bundle] += seating.share(bundle)
            assert taken == pytest.approx([1.0] * seating.bundles)


def test_ranks_follow_machines_and_devices_not_the_order_in_which_bundles_were_granted() -> None:
    nodes = {0: "b", 1: "a", 2: "b", 3: "a"}
    assert physical_order(nodes, {0: 1, 1: 7, 2: 0, 3: 3}) == [3, 1, 2, 0]
    assert physical_order(nodes, {}) == [1, 3, 0, 2]
