from __future__ import annotations

import pytest

from corerl.cluster.arrangement import arrange
from corerl.plan.processes import choose_transport, senders
from tests.driver.saved import make_config

# ---- how weights reach engines ---------------------------------------------------------------------------------------


def places(ranks: int, engines: int, *own_devices: str) -> dict[str, tuple[int, ...]]:
    groups = {"actor": ranks, "critic": 3, "engines": engines}
    return dict(arrange(groups, own_devices=["critic", *own_devices], cpus=1.0, gpus=1.0).places)


@pytest.mark.parametrize(
    ("ranks", "engines", "own_devices", "sending"),
    [
        (4, 4, [], (0, 1, 2, 3)),
        (4, 2, [], (0, 2)),
        (1, 1, [], (0,)),
        (2, 4, [], ()),  # two engines have a device of their own
        (2, 2, ["engines"], ()),
    ],
)
def test_an_engine_takes_from_the_rank_on_its_bundle(
    ranks: int, engines: int, own_devices: list[str], sending: tuple[int, ...]
) -> None:
    found = places(ranks, engines, *own_devices)
    assert senders(found["engines"], found["actor"], one_machine=False) == sending
    assert senders(found["engines"], found["actor"], one_machine=True) == (0,) * engines


@pytest.mark.parametrize(
    ("transport", "placement", "sending", "by_handle", "chosen"),
    [
        ("auto", "colocated", (0, 1), True, "ipc"),
        ("auto", "colocated", (0, 1), False, "collective"),  # the backend cannot
        ("auto", "colocated", (), True, "collective"),
        ("auto", "disaggregated", (0, 0), True, "collective"),
        ("ipc", "disaggregated", (0, 0), True, "ipc"),  # CPUs of one machine
        ("disk", "colocated", (0, 1), True, "disk"),
    ],
)
def test_auto_hands_over_memory_where_ranks_and_engines_share_devices(
    transport: str, placement: str, sending: tuple[int, ...], by_handle: bool, chosen: str
) -> None:
    config = make_config(weights={"transport": transport}, cluster={"placement": placement})
    assert choose_transport(config, sending, by_handle=by_handle) == chosen
