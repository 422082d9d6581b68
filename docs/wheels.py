"""The table of wheels in docs/installation.md: what each holds, by its pyproject.toml, and which extras install it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("all", "test", "docs", "dev", "tutorial")  # `all` has every wheel, and the others are this repository's own


def wheels_table() -> str:
    projects = [_project(ROOT)] + [_project(path.parent) for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    extras = projects[0]["optional-dependencies"]
    rows = ["| wheel | what is in it | extras that install it |", "|---|---|---|"]
    for project in projects:
        named = [f"`{each}`" for each in extras if each not in TOOLS and project["name"] in _installed(each, extras)]
        rows.append(f"| `{project['name']}` | {project['description']} | {', '.join(named) or '(always)'} |")
    return "\n".join([*rows, ""])


def _project(directory: Path) -> Mapping[str, Any]:
    project: Mapping[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    return project


def _installed(extra: str, extras: Mapping[str, Sequence[str]]) -> set[str]:
    """The distributions that an extra of core names, by itself or by another extra."""
    found: set[str] = set()
    for requirement in extras[extra]:
        name, _, others = re.split(r"[<>=]", requirement, maxsplit=1)[0].rstrip("]").partition("[")
        if name == "corerl":
            found = found.union(*(_installed(other, extras) for other in others.split(",")))
        else:
            found.add(name)
    return found
