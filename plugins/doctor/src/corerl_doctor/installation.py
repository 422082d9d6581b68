"""Check an installation from metadata alone: no plugin is imported."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from corerl.ops import why_unbuildable
from corerl.plugin import Entry, Finding, Kind, Level, ok, scan, unmet

PIP = "python -m pip"
LIBRARIES = ("torch", "transformers", "ray", "numpy")


def interpreter() -> Iterator[Finding]:
    yield ok(f"Python {platform.python_version()}, {sys.executable}, {platform.platform()}")
    versions = {name: _version(name) for name in ("corerl", *LIBRARIES)}
    yield ok(", ".join(f"{name} {found}" for name, found in versions.items() if found))
    for name, found in versions.items():
        if not found:
            yield Finding(
                level=Level.ERROR,
                what=f"{name} is not installed in this environment",
                why="no run can start without it",
                fix=f"{PIP} install {name}",
            )


def duplicates(entries: Sequence[tuple[Kind, Entry]]) -> Iterator[Finding]:
    """Warn of plugin distributions that are found several times, and names that several distributions offer."""
    # Not of `entries`: of several copies of a distribution Python reads the first on sys.path, which may be stale.
    ours = [each for each in distributions() if "[corerl." in (each.read_text("entry_points.txt") or "")]
    for name in sorted({each.metadata["Name"] for each in ours if _is_described(each)}):
        if len(found := _copies(name)) > 1:
            yield Finding(
                level=Level.WARNING,
                what=f"{name} is installed {len(found)} times: {', '.join(found)}",
                why="version, entry points and code may come from different ones",
                fix=f"{PIP} uninstall -y {name}, until nothing is left of it (delete what pip does not); then install "
                "it once",
            )
    offers: dict[tuple[Kind, str], dict[str, Entry]] = {}
    for kind, entry in entries:
        offers.setdefault((kind, entry.name), {})[entry.distribution] = entry
    for (kind, name), rivals in offers.items():
        if len(rivals) > 1:
            yield Finding(
                level=Level.WARNING,
                what=f"{kind.noun} {name!r} is provided by "
                + " and ".join(f"{entry.distribution} {entry.version}" for entry in rivals.values()),
                why=f"a config that names only {name!r} is rejected",
                fix=f"{PIP} uninstall {sorted(rivals)[-1]}; or write '{sorted(rivals)[0]}:{name}' in the config",
            )


def _is_described(distribution: Distribution) -> bool:
    """False for what an interrupted install has left, whose metadata some versions of Python's library raise for."""
    return bool(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO"))


def _copies(name: str) -> list[str]:
    """The copies of a distribution's metadata with different contents. Copies that say the same do not count: an
    editable install by setuptools has one from the install and one from the source tree."""
    found: dict[tuple[str, str], str] = {}
    for each in distributions(name=name):
        version = each.metadata["Version"] if _is_described(each) else "damaged"
        where = getattr(each, "_path", each.locate_file(""))
        found.setdefault((version, (each.read_text("entry_points.txt") or "").strip()), f"{version} in {where}")
    return list(found.values())


def editable(entries: Sequence[tuple[Kind, Entry]]) -> Iterator[Finding]:
    """Warn of editable installs whose pyproject.toml has other entry points than were installed."""
    for name in sorted({entry.distribution for _, entry in entries if entry.distribution}):
        project = _editable_project(distribution(name))
        if project is None:
            continue
        written = _written(project)
        if written is None:
            continue
        found = [(kind, entry) for kind, entry in all_entries() if entry.distribution == name]
        installed = {(kind.value, entry.name, entry.value) for kind, entry in found}
        for kind, point, value in sorted(written ^ installed):
            where = "only in" if (kind, point, value) in written else "no longer in"
            yield Finding(
                level=Level.WARNING,
                what=f"{name} is installed in place from {project}, and {point} = {value} of corerl.{kind} is {where} "
                "its pyproject.toml",
                why="entry points are copied when a package is installed; editing them changes nothing until then",
                fix=f"{PIP} install --no-deps -e {project}",
            )


def requirements(distributions: Iterable[str]) -> Iterator[Finding]:
    """What these distributions require and the environment lacks."""
    for each in unmet(distributions):
        yield Finding(
            level=Level.ERROR,
            what=str(each),
            why="a run that needs it does not start",
            fix=f"{PIP} install '{each.wanted}'",
        )


def driver() -> Iterator[Finding]:
    """What NVIDIA's driver reports about this machine, without torch."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield ok("no NVIDIA driver on this machine: runs use the CPU")
        return
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=60.0)
        text = shown.stdout.strip() if shown.returncode == 0 else ""
        reason = (shown.stderr or shown.stdout).strip().partition("\n")[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        text, reason = "", str(error)
    if text:
        for line, count in Counter(text.splitlines()).items():
            device, comma, number = line.rpartition(",")
            yield ok(f"{count} x {device}, driver{number}" if comma else f"{count} x {line}")
        if reason := why_unbuildable():
            yield Finding(
                level=Level.WARNING,
                what=reason,
                why=(
                    "log-probs on GPUs fall back to torch operators, with 1.4 to 2.7 times the kernels' time and more "
                    "memory"
                ),
                fix=f"{PIP} install triton" if "installed" in reason else "the system's gcc package",
            )
    else:
        yield Finding(
            level=Level.WARNING,
            what=f"nvidia-smi shows no GPU: {reason}",
            why="runs use the CPU here, unless this machine only drives a cluster",
            fix="run nvidia-smi and follow its output (often a reboot after a driver update)",
        )


def all_entries() -> list[tuple[Kind, Entry]]:
    """Every entry point of every kind."""
    return [(kind, entry) for kind in Kind for entry in scan(kind)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _editable_project(installed: Distribution) -> Path | None:
    """The source directory of an editable install (PEP 610); None for any other install."""
    try:
        found: Any = json.loads(installed.read_text("direct_url.json") or "{}")
        return Path(unquote(urlparse(str(found["url"])).path)) if found["dir_info"]["editable"] else None
    except (ValueError, LookupError, TypeError):  # not from a directory, or damaged
        return None


def _written(project: Path) -> set[tuple[str, str, str]] | None:
    """(kind, name, value) of each entry point in a pyproject.toml; None if they cannot be read from it."""
    try:
        table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, tomllib.TOMLDecodeError):
        return None  # moved away, or half-edited
    if not table or "entry-points" in table.get("dynamic", ()):
        return None
    groups = table.get("entry-points", {})
    return {(kind.value, name, value) for kind in Kind for name, value in groups.get(kind.group, {}).items()}
