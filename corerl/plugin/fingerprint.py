"""Where a role's plugins came from, as data: driver and workers each resolve them by name, and must find the same."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import asdict, frozen

import corerl
from corerl.errors import PluginError, PluginIncompatible
from corerl.plugin.registry import Kind, Loaded, found_twice, load
from corerl.types import LossSpec


@frozen(kw_only=True)
class Fingerprint:
    """Plain data: crosses Ray beside the config."""

    backend: str  # its name
    distribution: str
    version: str
    value: str  # of the entry point
    api: str
    extensions: tuple[tuple[str, str, str, str], ...]  # (name, distribution, version, value), in the config's order
    loss: str  # as a call, "clipped(clip_high=0.28, ...)"; empty for a role that is not trained
    corerl: str  # version


def fingerprint(loaded: Loaded, extensions: Sequence[Loaded], loss: LossSpec | None) -> Fingerprint:
    """Of a backend, the extensions that live in workers, and the loss."""
    return Fingerprint(
        backend=loaded.name,
        distribution=loaded.distribution,
        version=loaded.version,
        value=loaded.value,
        api=".".join(map(str, loaded.spec.api)),
        extensions=tuple((each.name, each.distribution, each.version, each.value) for each in extensions),
        loss=_call(loss) if loss else "",
        corerl=corerl.__version__,
    )


def _call(loss: LossSpec) -> str:
    return f"{loss.name}({', '.join(f'{name}={value!r}' for name, value in sorted(loss.params.items()))})"


def differences(a: Fingerprint, b: Fingerprint) -> list[str]:
    """One entry for each field that differs, `a`'s value first."""
    left, right = asdict(a), asdict(b)
    words = {"version": f"{a.distribution} version", "corerl": "corerl version"}
    return [
        f"{words.get(name, name)} {left[name]!r} against {right[name]!r}" for name in left if left[name] != right[name]
    ]


def require_same(driver: Fingerprint, own: Fingerprint, *, plugins: Sequence[Loaded] = ()) -> None:
    """Called in each worker. Raises PluginIncompatible where its plugins are not the driver's. `plugins` are those
    found here, one of which may be another copy than its node's owner thinks."""
    if found := differences(driver, own):
        twice = "".join(f"; {text}" for text in map(found_twice, plugins) if text)
        raise PluginIncompatible(
            f"its plugins are not the driver's (driver's first): {'; '.join(found)}{twice}; "
            "install the same corerl and the same plugins on every node"
        )


# ---- one plugin of any kind ------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Origin:
    """Where one plugin came from, or why it is not there. Plain data too."""

    kind: str  # backend, engine, extension; or core
    name: str
    distribution: str = ""
    version: str = ""
    value: str = ""  # of the entry point
    problem: str = ""  # why it cannot be loaded

    def __str__(self) -> str:
        what = self.name if self.kind == "core" else f"{self.kind} {self.name!r}"
        return f"{what} ({self.source})" if self.distribution else what

    @property
    def source(self) -> str:
        return f"{self.distribution} {self.version}" if self.distribution else self.value

    @property
    def requirement(self) -> str:
        """What to have pip install."""
        return f"{self.distribution}=={self.version}" if self.distribution else self.value

    def against(self, other: Origin) -> str:
        """How `other`, found elsewhere, differs; "" where it does not."""
        if other.problem:
            return other.problem
        if (self.distribution, self.version) != (other.distribution, other.version):
            return f"{self.kind} {self.name!r} is {other.source}, the driver's is {self.source}"
        if self.value != other.value:
            return f"{self.kind} {self.name!r} is {other.value}, the driver's is {self.value}"
        return ""


def origin(kind: Kind, loaded: Loaded) -> Origin:
    return Origin(
        kind=kind.noun,
        name=loaded.name,
        distribution=loaded.distribution,
        version=loaded.version,
        value=loaded.value,
    )


def require_same_origin(driver: Origin, own: Origin) -> None:
    """Called in each engine's process. Raises PluginIncompatible where its plugin is not the driver's."""
    if text := driver.against(own):
        raise PluginIncompatible(f"{text}; install the same plugins on every node")


def origins(named: Sequence[tuple[Kind, str]]) -> list[Origin]:
    """Of CoreRL itself, then of each plugin, as far as this process finds them."""
    found = [Origin(kind="core", name="corerl", distribution="corerl", version=corerl.__version__)]
    for kind, name in named:
        try:
            found.append(origin(kind, load(kind, name)))
        except PluginError as error:
            found.append(Origin(kind=kind.noun, name=name, problem=error.message))
    return found
