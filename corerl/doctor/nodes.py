"""Report the plugins of one node of a cluster; runs on that node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict

from corerl.plugin.fingerprint import look_for
from corerl.plugin.registry import Kind


def plugins_here(named: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The Origin of each (value of Kind, name), as plain data."""
    return [asdict(each) for each in look_for([(Kind(kind), name) for kind, name in named])]
