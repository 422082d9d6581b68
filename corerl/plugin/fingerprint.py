"""Where plugins come from, as data: the driver and each worker resolve them by name, and must find the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

import corerl
from corerl.errors import PluginError, PluginIncompatible
from corerl.plugin.registry import Kind, Loaded, found_twice, load


@frozen(kw_only=True)
class Origin:
    """Where one plugin, or CoreRL itself, comes from, or why it cannot be loaded. Plain data: crosses Ray."""

    kind: str  # backend, engine, extension or core
    name: str
    distribution: str = ""
    version: str = ""
    value: str = ""  # the entry point's value
    problem: str = ""  # why it cannot be loaded

    def __str__(self) -> str:
        return f"{self.what} ({self.source})" if self.distribution else self.what

    @property
    def what(self) -> str:
        return self.name if self.kind == "core" else f"{self.kind} {self.name!r}"

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
        if (self.distribution, self.version) != (other.distribution, other.version):
            return f"{self.what} is {other.source}, but the driver's is {self.source}"
        if self.value != other.value:
            return f"{self.what} is {other.value}, but the driver's is {self.value}"
        return ""


def origins_of(*plugins: tuple[Kind, Loaded]) -> tuple[Origin, ...]:
    """The origins of CoreRL itself, then of each plugin."""
    return (_core(), *[_origin(kind, loaded) for kind, loaded in plugins])


def look_for(named: Sequence[tuple[Kind, str]]) -> list[Origin]:
    """The origins of CoreRL itself, then of each plugin, as this process finds them."""
    found = [_core()]
    for kind, name in named:
        try:
            found.append(_origin(kind, load(kind, name)))
        except PluginError as error:
            found.append(Origin(kind=kind.noun, name=name, problem=error.message))
    return found


def plugins_here(named: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """`look_for` each (value of Kind, name) as plain data; runs on the nodes of a cluster, which need core alone."""
    return [asdict(each) for each in look_for([(Kind(kind), name) for kind, name in named])]


def require_same(driver: Sequence[Origin], *plugins: tuple[Kind, Loaded]) -> None:
    """Raise PluginIncompatible if this process has loaded another CoreRL or other plugins than the driver. Called in
    each process of a run."""
    found = [text for there, here in zip(driver, origins_of(*plugins), strict=True) if (text := there.against(here))]
    if found:
        # A node's owner may have another copy in mind than the one in use.
        found += filter(None, [found_twice(loaded) for _, loaded in plugins])
        raise PluginIncompatible(f"{'; '.join(found)}; install the same corerl and the same plugins on every node")


def _core() -> Origin:
    return Origin(kind="core", name="corerl", distribution="corerl", version=corerl.__version__)


def _origin(kind: Kind, loaded: Loaded) -> Origin:
    return Origin(
        kind=kind.noun,
        name=loaded.name,
        distribution=loaded.distribution,
        version=loaded.version,
        value=loaded.value,
    )
