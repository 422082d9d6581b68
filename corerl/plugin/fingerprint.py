"""Where plugins come from, as data: the driver and each worker resolve them by name, and must find the same ones."""

from __future__ import annotations

from collections.abc import Sequence
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
        if self.source != other.source:
            return f"{self.what} is {other.source}, but the driver's is {self.source}"
        if self.value != other.value:
            return f"{self.what} is {other.value}, but the driver's is {self.value}"
        return ""


def origins_of(*plugins: tuple[Kind, Loaded]) -> tuple[Origin, ...]:
    """The origins of CoreRL itself, then of each plugin."""
    core = Origin(what="corerl", distribution="corerl", version=corerl.__version__)
    return core, *(
        Origin(
            what=f"{kind.noun} {loaded.name!r}",
            distribution=loaded.distribution,
            version=loaded.version,
            value=loaded.value,
        )
        for kind, loaded in plugins
    )


def look_for(named: Sequence[tuple[Kind, str]]) -> list[Origin]:
    """The origins of CoreRL itself, then of each plugin, as this process finds them."""
    found = list(origins_of())
    for kind, name in named:
        try:
            found += origins_of((kind, load(kind, name)))[1:]
        except PluginError as error:
            found.append(Origin(what=f"{kind.noun} {name!r}", problem=error.message))
    return found


def plugins_here(named: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """`look_for` each (value of Kind, name) as plain data; runs on the nodes of a cluster, which need core alone."""
    return [asdict(each) for each in look_for([(Kind(kind), name) for kind, name in named])]


def require_same(driver: Sequence[Origin], *plugins: tuple[Kind, Loaded]) -> None:
    """Raise PluginIncompatible if this process has loaded another CoreRL or other plugins than the driver. Called in
    each process of a run."""
    found = [text for there, here in zip(driver, origins_of(*plugins), strict=True) if (text := there.against(here))]
    if found:
        raise PluginIncompatible(f"{'; '.join(found)}; install the same corerl and the same plugins on every node")
