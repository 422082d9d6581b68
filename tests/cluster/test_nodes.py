from __future__ import annotations

import pytest

from corerl.cluster.nodes import interface_of


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("203.0.113.7", ""), ("127.0.0.2", ""), ("::1", "")]
)
def test_an_interface_is_the_one_that_has_the_address(address: str, interface: str) -> None:
    assert interface_of(address) == interface
