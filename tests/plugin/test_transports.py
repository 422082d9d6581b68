from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from corerl.plugin.transports import abandon, open_receiver, open_sender
from corerl.weights.transport import Address

Install = Callable[..., Path]
SPEC = """
from corerl.plugin import Capability, TransportSpec

SPEC = TransportSpec(
    sender="pigeons:Pigeon",
    receiver="pigeons:Roost",
    abandon="pigeons:Roost.leave",
    capability=Capability.UPDATE_DISK,
    api=(2, 0),
    summary="by air",
)

class Pigeon:
    def __init__(self, address, rank, lost):
        self.given = (address, rank, lost)

class Roost:
    left = []

    def __init__(self, address, index):
        self.given = (address, index)

    @staticmethod
    def leave(address):
        Roost.left.append(address)
"""


def test_both_ends_are_made_of_the_address_and_their_place(install: Install) -> None:
    install("corerl-pigeons", {"transports": {"pigeon": "pigeons:SPEC"}}, pigeons=SPEC)
    address = Address(transport="pigeon", engines=("engine-0", "engine-1"), options={"feathers": 2})
    lost: dict[str, str] = {}
    sender, receiver = open_sender(address, rank=3, lost=lost), open_receiver(address, index=1)
    assert (vars(sender)["given"], vars(receiver)["given"]) == ((address, 3, lost), (address, 1))
    assert type(sender).__name__ == "Pigeon"
    abandon(address)
    assert vars(type(receiver))["left"] == [address]
