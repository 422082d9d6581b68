"""Where a role's plugins came from, as data: driver and workers each resolve them by name, and must find the same."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import asdict, frozen

import corerl
from corerl.errors import PluginIncompatible
from corerl.plugin.registry import Loaded
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
    return [f"{name} {left[name]!r} against {right[name]!r}" for name in left if left[name] != right[name]]


def require_same(driver: Fingerprint, own: Fingerprint, *, role: str, rank: int) -> None:
    """Called in each worker. Raises PluginIncompatible where its plugins are not the driver's."""
    if found := differences(driver, own):
        raise PluginIncompatible(
            f"{role} rank {rank} has other plugins than the driver (driver's first): {'; '.join(found)}; "
            "install the same corerl and the same plugins on every node"
        )
