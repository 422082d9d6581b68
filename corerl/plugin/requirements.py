"""Compare what is installed with what the metadata of a distribution requires: pip only looks when it installs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen

from corerl.errors import PluginIncompatible


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
        for each in _unmet(name) if name else ():
            found.setdefault(each.wanted, each)
    return list(found.values())


def require_met(distributions: Iterable[str]) -> None:
    """Raise PluginIncompatible, in one line, if this environment lacks what these distributions require."""
    if lacks := unmet(distributions):
        raise PluginIncompatible(f"{'; '.join(map(str, lacks))}; {installing(lacks)}")


def installing(lacks: Iterable[Unmet]) -> str:
    """The command that installs what is lacking."""
    return " ".join(["python -m pip install", *(f"'{each.wanted}'" for each in lacks)])


def _unmet(name: str) -> Iterator[Unmet]:
    # These cost more to import than all of `import corerl`.
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement

    try:
        own = distribution(name)
    except PackageNotFoundError:  # run from a source tree
        return
    for line in own.requires or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        wanted.marker = None
        try:
            version = distribution(wanted.name).version
        except PackageNotFoundError:
            version = ""
        # A pre-release counts as its release too: vendors' containers come with such as torch 2.9.0a0.
        if not version or not any(wanted.specifier.contains(each, prereleases=True) for each in _releases(version)):
            yield Unmet(by=f"{name} {own.version}", name=wanted.name, wanted=str(wanted), found=version)


def _releases(version: str) -> tuple[str, str]:
    from packaging.version import Version

    return version, Version(version).base_version
