"""What several packages' tests share."""

from __future__ import annotations

import pytest

from corerl.plugin.registry import INSTALL_HINTS, Kind


@pytest.fixture
def absent_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """A first-party backend that no environment has installed."""
    monkeypatch.setitem(INSTALL_HINTS[Kind.BACKENDS], "absent", "pip install 'corerl[absent]'")
    return "absent"
