"""Where plugins come from, as data: every process of a run must find the same ones."""

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
