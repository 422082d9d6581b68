"""Compare what is installed with what the metadata of a distribution requires: pip only looks when it installs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from corerl.errors import PluginIncompatible
from corerl.imports import Where, importable

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet


@frozen(kw_only=True)
class Unmet:
    """A requirement that this environment does not meet."""

    by: str  # the distribution that has the requirement, with its version
    name: str  # of the distribution that it requires
    wanted: str  # as pip takes it
    found: str  # the installed version; empty if there is none

    def __str__(self) -> str:
        found = f"{self.name} {self.found} is installed" if self.found else f"no {self.name} is installed"
        return f"{self.by} requires {self.wanted}, but {found}"


def unmet(distributions: Iterable[str]) -> list[Unmet]:
    """What the distributions of these names require and this environment lacks, each requirement once. Requirements of
    extras do not count, nor those for other Pythons and systems; a name that is not installed requires nothing."""
    found: dict[str, Unmet] = {}
    for name in dict.fromkeys(distributions):
        for each in _unmet(name, importable()):
            found.setdefault(each.wanted, each)
    return list(found.values())


def require_met(distributions: Iterable[str]) -> None:
    """Raise PluginIncompatible, in one line, if this environment lacks what these distributions require."""
    if lacks := unmet(distributions):
        raise PluginIncompatible(f"{'; '.join(map(str, lacks))}; {installing(lacks)}")


def installing(lacks: Iterable[Unmet]) -> str:
    """The command that installs what is lacking."""
    return " ".join(["python -m pip install", *(f"'{each.wanted}'" for each in lacks)])


@functools.lru_cache(maxsize=64)
def _unmet(name: str, where: Where) -> Sequence[Unmet]:
    """What the distribution lacks: each worker asks."""
    own = _installed(name, where)
    if own is None:  # run from a source tree
        return ()
    found = []
    for wanted in own.requires:
        other = _installed(wanted.name, where)
        version = "" if other is None else other.version
        if not version or not _admits(wanted.specifier, version):
            found.append(Unmet(by=f"{name} {own.version}", name=wanted.name, wanted=str(wanted), found=version))
    return tuple(found)


@frozen
class _Installed:
    version: str
    requires: tuple[Requirement, ...]  # those that hold for this Python and system, without their markers


@functools.lru_cache(maxsize=256)
def _installed(name: str, where: Where) -> _Installed | None:
    """What METADATA says: packages put their whole README into it, and several require the same ones."""
    # It costs more to import than all of `import corerl`.
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError):  # ValueError: no name at all
        return None
    requires = []
    for line in found.requires or ():
        try:
            wanted = Requirement(line)
        except InvalidRequirement:  # pip does not install such metadata either
            continue
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            wanted.marker = None
            requires.append(wanted)
    return _Installed(found.version, tuple(requires))


def _admits(specifier: SpecifierSet, found: str) -> bool:
    """Whether a requirement admits this version. A pre-release counts as its release too: vendors' containers come with
    such as torch 2.9.0a0."""
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(found).base_version
    except InvalidVersion:
        return not specifier  # there is nothing to compare
    return any(specifier.contains(each, prereleases=True) for each in (found, release))
