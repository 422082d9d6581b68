"""Where plugins come from, as data: every process of a run must find the same ones, with what they require."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict, frozen

import corerl
from corerl.errors import PluginError, PluginIncompatible
from corerl.plugin.registry import Kind, Loaded, load


@frozen(kw_only=True)
class Origin:
    """Where one plugin, or CoreRL itself, comes from, or why it cannot be loaded. Plain data: crosses Ray."""

    what: str  # such as "backend 'mine'"
    distribution: str = ""
    version: str = ""
    value: str = ""  # the entry point's value
    problem: str = ""  # why it cannot be loaded

    def __str__(self) -> str:
        return f"{self.what} ({self.source})" if self.distribution else self.what

    @property
    def source(self) -> str:
        return f"{self.distribution} {self.version}" if self.distribution else self.value

    @property
    def requirement(self) -> str:
        """The requirement to pass to pip."""
        return f"{self.distribution}=={self.version}" if self.distribution else self.value

    def against(self, other: Origin) -> str:
        """How `other`, found in another process, differs; "" if it does not."""
        if other.problem:
            return other.problem
        for own, there in ((self.source, other.source), (self.value, other.value)):
            if own != there:
                return f"{self.what} is {there}, but the driver's is {own}"
        return ""


def origins_of(*plugins: tuple[Kind, Loaded]) -> tuple[Origin, ...]:
    """The origins of CoreRL itself, then of each plugin."""
    core = Origin(what="corerl", distribution="corerl", version=corerl.__version__)
    return core, *(
        Origin(what=f"{kind.noun} {one.name!r}", distribution=one.distribution, version=one.version, value=one.value)
        for kind, one in plugins
    )


def plugins_here(named: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The origins of CoreRL itself, then of each plugin (value of Kind, name), as this process finds them, as plain
    data; runs on nodes of a cluster, which need core alone."""
    found = list(origins_of())
    for kind, name in ((Kind(value), name) for value, name in named):
        try:
            found += origins_of((kind, load(kind, name)))[1:]
        except PluginError as error:
            found.append(Origin(what=f"{kind.noun} {name!r}", problem=error.message))
    return [asdict(each) for each in found]


def load_same(driver: Sequence[Origin], *named: tuple[Kind, str]) -> list[Loaded]:
    """Load the plugins of a run in one of its processes, those without a name left out. Raises PluginError if this
    machine cannot load what the driver could, PluginIncompatible if CoreRL or a plugin is another here."""
    plugins: list[tuple[Kind, Loaded]] = []
    for kind, name in named:
        try:
            plugins += [(kind, load(kind, name))] if name else []
        except PluginError as error:
            raise type(error)(
                f"{error.message}; the driver could load this {kind.noun}, so install it on every node"
            ) from error
    found = [text for there, here in zip(driver, origins_of(*plugins), strict=True) if (text := there.against(here))]
    if found:
        raise PluginIncompatible(f"{'; '.join(found)}; install the same corerl and the same plugins on every node")
    return [loaded for _, loaded in plugins]


# ---- requirements, which pip only compares when it installs ---------------------------------------------------------


@frozen(kw_only=True)
class Unmet:
    """A requirement that this environment does not meet."""

    by: str  # the distribution that has the requirement, with its version
    name: str  # of the distribution that it requires
    wanted: str  # as pip takes it
    found: str  # the installed version; empty if it is not installed

    def __str__(self) -> str:
        found = f"{self.name} {self.found} is installed" if self.found else f"no {self.name} is installed"
        return f"{self.by} requires {self.wanted}, but {found}"


def unmet(distributions: Iterable[str]) -> list[Unmet]:
    """What the distributions of these names require and this environment lacks, each requirement once. Requirements of
    extras do not count, nor those for other Pythons and systems; a name that is not installed requires nothing."""
    # These cost more to import than all of `import corerl`.
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement
    from packaging.version import Version

    def version_of(name: str) -> str:
        try:
            return distribution(name).version if name else ""
        except PackageNotFoundError:
            return ""

    found: dict[str, Unmet] = {}
    for name in distributions:
        own = version_of(name)
        for wanted in map(Requirement, (distribution(name).requires or ()) if own else ()):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            wanted.marker = None
            version = version_of(wanted.name)
            # A pre-release counts as its release too: vendors' containers come with such as torch 2.9.0a0.
            releases = (version, Version(version).base_version) if version else ()
            if not any(wanted.specifier.contains(each, prereleases=True) for each in releases):
                lack = Unmet(by=f"{name} {own}", name=wanted.name, wanted=str(wanted), found=version)
                found.setdefault(lack.wanted, lack)
    return list(found.values())


def require_met(distributions: Iterable[str]) -> None:
    """Raise PluginIncompatible, in one line, if this environment lacks what these distributions require."""
    if lacks := unmet(distributions):
        install = " ".join(["python -m pip install", *(f"'{each.wanted}'" for each in lacks)])
        raise PluginIncompatible(f"{'; '.join(map(str, lacks))}; {install}")
