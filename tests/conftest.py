"""What several packages' tests share."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corerl import __version__
from corerl.plugin import registry
from corerl.plugin.registry import EXTRAS, Kind


@pytest.fixture(scope="session", autouse=True)
def own_plugins_only() -> Iterator[None]:
    """Hides from this process plugins of the environment that are not CoreRL's own, such as a backend of the tutorial's
    name, mine; not what tests install."""
    plugins = Path(__file__).parent.parent / "plugins"
    own = {"corerl", *(f"corerl-{each.name}" for each in plugins.iterdir())}
    foreign = {entry.metadata for kind in Kind for entry in registry.scan(kind) if entry.distribution not in own}
    found = importlib.metadata.distributions

    def distributions(**only: Any) -> Iterator[importlib.metadata.Distribution]:
        return (each for each in found(**only) if str(getattr(each, "_path", each.locate_file(""))) not in foreign)

    with pytest.MonkeyPatch.context() as patch:
        if foreign:
            patch.setattr(importlib.metadata, "distributions", distributions)
            registry._scanned.cache_clear()
        yield
        registry._scanned.cache_clear()


@pytest.fixture
def absent_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """A first-party backend that no environment has installed."""
    monkeypatch.setitem(EXTRAS[Kind.BACKENDS], "absent", "absent")
    return "absent"


@pytest.fixture
def old_tomli_w(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The metadata of a tomli-w that is too old lies before the real one's; returns what is said of it."""
    metadata = tmp_path / "old" / "tomli_w-0.4.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tomli-w\nVersion: 0.4.0\n")
    monkeypatch.syspath_prepend(metadata.parent)
    return (
        f"corerl {__version__} requires tomli-w>=1.0, but tomli-w 0.4.0 is installed; "
        "python -m pip install 'tomli-w>=1.0'"
    )
