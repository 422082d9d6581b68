"""Install an example package for a test as pip would: its directory on sys.path, and metadata with its entry points."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "plugins"


def install_example(name: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`site` is an empty directory for the metadata."""
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    (metadata / "METADATA").write_text("\n".join([*lines, ""]))
    points = [
        f"[{group}]\n" + "".join(f"{point} = {value}\n" for point, value in named.items())
        for group, named in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("".join(points))
    monkeypatch.syspath_prepend(EXAMPLES / name)
    monkeypatch.syspath_prepend(site)
