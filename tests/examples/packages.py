"""An example package as pip would leave it: its modules beside its metadata, in a directory for sys.path."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "plugins"


def put(name: str, site: Path) -> Path:
    """Install the example of this name into `site`, and return that."""
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    source = EXAMPLES / name / "src"
    shutil.copytree(source if source.exists() else EXAMPLES / name, site)
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    requires = [f"Requires-Dist: {each}" for each in project["dependencies"]]
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}", *requires]
    (metadata / "METADATA").write_text("\n".join([*lines, ""]))
    points = [
        line
        for group, named in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in named.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join([*points, ""]))
    return site
