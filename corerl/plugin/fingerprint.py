"""Where a role's plugins came from, as data: driver and workers each resolve them by name, and must find the same."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import asdict, frozen

import corerl
from corerl.config.schema import ExtensionChoice
from corerl.plugin.observers import extensions_for
from corerl.plugin.registry import Loaded
from corerl.plugin.spec import Process
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
    loss: str  # its name; empty for a role that is not trained
    corerl: str  # version


def fingerprint(loaded: Loaded, extensions: Sequence[ExtensionChoice], loss: LossSpec | None) -> Fingerprint:
    """Of a backend, those of the chosen extensions that live in workers, and the loss."""
    return Fingerprint(
        backend=loaded.name,
        distribution=loaded.distribution,
        version=loaded.version,
        value=loaded.value,
        api=".".join(map(str, loaded.spec.api)),
        extensions=tuple(
            (each.name, each.distribution, each.version, each.value)
            for _, each in extensions_for(extensions, Process.WORKER)
        ),
        loss=loss.name if loss else "",
        corerl=corerl.__version__,
    )


def differences(a: Fingerprint, b: Fingerprint) -> list[str]:
    """One entry for each field that differs, `a`'s value first."""
    left, right = asdict(a), asdict(b)
    return [f"{name} {left[name]!r} against {right[name]!r}" for name in left if left[name] != right[name]]
