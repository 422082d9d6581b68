"""Small distributions with plugins that are amiss in ways that only another process can be asked about."""

from __future__ import annotations

import json
from pathlib import Path

SPEC = """
from attrs import frozen
from corerl.plugin import BackendSpec, Finding, Level

@frozen(kw_only=True)
class Options:
    pass

def probe():
    {probe}

SPEC = BackendSpec(
    implementation="{code}", config=Options, api=(2, 0), summary="amiss", probe=probe,
    environment=lambda options, cluster: {{"MINE_RANKS": str(cluster.ranks)}},
)
"""
PLAIN = "corerl_testing.plain.backend:PlainBackend"


def spec(*, probe: str = "return ()", code: str = PLAIN) -> str:
    """Source of a module with a SPEC."""
    return SPEC.format(probe=probe, code=code)


def distribution(
    site: Path, name: str, points: str, *, version: str = "0.1", editable: Path | None = None, **modules: str
) -> None:
    """`points` are lines of entry points of backends; `editable` the project that it is installed in place from."""
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[corerl.backends]\n{points}\n")
    if editable is not None:
        url = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(url))
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
