"""What the probe says of the libraries that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.plugin import Level
from corerl_megatron.spec import SPEC


@pytest.mark.parametrize(
    ("version", "level", "what"),
    [
        ("0.6.2", Level.OK, "Megatron-Bridge 0.6.2 is supported by this backend"),
        ("0.3.1", Level.WARNING, "Megatron-Bridge 0.3.1 is not supported by this backend"),
        ("", None, ""),
    ],
)
def test_megatron_bridge_is_told_of_where_it_is_installed(
    version: str, level: Level | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        metadata = tmp_path / f"megatron_bridge-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-bridge\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    core, *found = [each for each in SPEC.probe() if "egatron-" in each.what]
    assert (core.level, [(each.level, each.what) for each in found]) == (Level.OK, [(level, what)] if version else [])
