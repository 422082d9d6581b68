from __future__ import annotations

from types import SimpleNamespace

import pytest

from corerl.cluster import nodes
from corerl.cluster.nodes import interface_of, require_ray
from corerl.errors import CorerlError


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("203.0.113.7", ""), ("127.0.0.2", ""), ("::1", "")]
)
def test_an_interface_is_the_one_that_has_the_address(address: str, interface: str) -> None:
    assert interface_of(address) == interface


def test_no_process_is_started_where_raylet_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(nodes.ray, "nodes", lambda: [{"NodeID": "own", "Alive": True}])
    require_ray()
    for found in ([{"NodeID": "own", "Alive": False}, {"NodeID": "other", "Alive": True}], []):
        monkeypatch.setattr(nodes.ray, "nodes", lambda found=found: found)
        with pytest.raises(CorerlError, match="^Ray's raylet on this machine has died; see its logs "):
            require_ray()
