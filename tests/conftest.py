"""What several packages' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl import __version__
from corerl.plugin.registry import INSTALL_HINTS, Kind


@pytest.fixture
def absent_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """A first-party backend that no environment has installed."""
    monkeypatch.setitem(INSTALL_HINTS[Kind.BACKENDS], "absent", "pip install 'corerl[absent]'")
    return "absent"


@pytest.fixture
def old_pluggy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The metadata of a pluggy that is too old lies before the real one's; returns what is said of it."""
    metadata = tmp_path / "old" / "pluggy-1.6.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pluggy\nVersion: 1.6.0\n")
    monkeypatch.syspath_prepend(metadata.parent)
    return (
        f"corerl {__version__} requires pluggy<2,>=1.7, but pluggy 1.6.0 is installed; "
        "python -m pip install 'pluggy<2,>=1.7'"
    )
