"""Check everything from a plugin's name to its code; runs in a separate process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, fields

from corerl.config import ClusterInfo
from corerl.errors import ContractError, PluginBroken, PluginConflict, PluginError, PluginIncompatible, PluginNotFound
from corerl.messages import did_you_mean
from corerl.plugin import (
    API,
    BackendSpec,
    Entry,
    Finding,
    Kind,
    Level,
    Loaded,
    load,
    load_implementation,
    locate,
    ok,
    usable,
)
from corerl_doctor.child import CheckStarted, Report
from corerl_doctor.installation import PIP
from corerl_doctor.listing import kinds_of, known_names
from corerl_doctor.moved import replaced


def check_specs(plugins: Sequence[tuple[str, str]]) -> Iterator[Report]:
    """Check the spec and API of each (value of Kind, name)."""
    for kind, name in plugins:
        yield from _check_plugin(Kind(kind), name, deep=False)


def check_plugins(plugins: Sequence[tuple[str, str]]) -> Iterator[Report]:
    """Like `check_specs`, and also check each implementation, hooks and probe."""
    for kind, name in plugins:
        yield from _check_plugin(Kind(kind), name, deep=True)


def check_joining(listed: Sequence[str] | None) -> Iterator[Report]:
    """`check_plugins` at the extensions that join by themselves a run that lists these, or (None) none at all."""
    joins = ("always",) if listed is not None else ("default", "always")
    joining = [each.name for each in usable(Kind.EXTENSIONS) if each.spec.joins in joins]
    joining = [name for name in joining if name not in (listed or ())]
    yield from check_plugins([(Kind.EXTENSIONS.value, name) for name in joining])


def check_named(name: str) -> Iterator[Report]:
    """`check_plugins` at every plugin of this name, whatever its kind."""
    yield CheckStarted(f"importing {name}", f"fix {name}")  # 'package.module:SPEC' is imported to find its kind
    try:
        kinds = kinds_of(name)
        if not kinds:
            known = [each for kind in Kind for each in known_names(kind)]
            raise PluginNotFound(f"unknown plugin {name!r}{did_you_mean(name, known)}")
    except PluginError as error:
        finding = finding_of(error, None, name)
        if Path(name).is_dir() or name.endswith(".toml"):
            finding = evolve(finding, fix=f"{finding.fix}; for a run's file: corerl doctor --config FILE")
        yield finding
        return
    for kind in kinds:
        yield from _check_plugin(kind, name, deep=True)


def _check_plugin(kind: Kind, name: str, *, deep: bool) -> Iterator[Report]:
    try:
        entry = locate(kind, name)
    except PluginError as error:
        yield finding_of(error, kind, name)
        return
    yield CheckStarted(f"importing {entry.value}, the spec of {kind.noun} {entry},", reinstall(entry))
    try:
        loaded = load(kind, name)
    except PluginError as error:
        yield finding_of(error, kind, name, entry)
        return
    api = ".".join(map(str, loaded.spec.api))
    yield ok(f"{kind.noun} {loaded}: {loaded.value} loads, written for API {api}")
    if not deep:
        return
    for code in _codes(kind, loaded.spec):
        yield CheckStarted(f"importing {code}, the implementation of {kind.noun} {loaded},", reinstall(entry))
        try:
            implementation = load_implementation(kind, loaded, code)
        except PluginError as error:
            yield finding_of(error, kind, name, entry)
            return
        yield ok(f"{kind.noun} {loaded}: {code} can be imported")
    if kind is Kind.BACKENDS:
        yield from _shares(loaded)
        yield CheckStarted(f"making an instance of {code}", f"fix {code}")
        yield from _hooks(loaded, implementation)
    if kind in (Kind.BACKENDS, Kind.ENGINES):
        yield CheckStarted(f"the probe of {kind.noun} {loaded}", f"fix the probe of {loaded.value}")
        yield from loaded.spec.probe()
    if kind is Kind.BACKENDS:
        yield CheckStarted(f"the environment of {kind.noun} {loaded}", f"fix the environment of {loaded.value}")
        yield from _environment(loaded)


def _codes(kind: Kind, spec: Any) -> list[str]:
    """What its processes import."""
    if kind is Kind.TRANSPORTS:
        return [spec.sender, spec.receiver]
    return [spec.implementation, *([spec.inputs] if kind is Kind.PICTURES else ())]


def _shares(loaded: Loaded) -> Iterator[Finding]:
    """Whether ranks that share samples are tried beside ranks that have others."""
    spec: BackendSpec = loaded.spec
    all_ranks = fields(BackendSpec).data_parallel.default
    if spec.data_parallel is all_ranks or any(each.ranks > 2 for each in spec.variants):
        return
    yield Finding(
        level=Level.WARNING,
        what=f"backend {loaded}: its data_parallel is not always the number of ranks, and no variant has ranks=4",
        why="on two ranks either all share samples or none does: gradients that are summed over the wrong ranks, or "
        "not at all, such as a norm's, then pass corerl verify",
        fix="add Variant(name=..., options=..., ranks=4) to the spec, with options for which two ranks share samples, "
        f"then: corerl verify {loaded.name}",
    )


def _hooks(loaded: Loaded, implementation: Any) -> Iterator[Finding]:
    """Whether the backend keeps the hook contract, as a worker checks before the first call."""
    from corerl.backend import PluginHost
    from corerl.plugin import Context

    context = Context(role="actor", rank=0, world_size=1, local_rank=0, run_dir="")
    try:
        PluginHost(implementation(), name=loaded.name, context=context, capabilities=loaded.spec.capabilities)
    except ContractError as error:
        yield Finding(
            level=Level.ERROR,
            what=error.message,
            why="workers reject a plugin that does not meet the hook contract",
            fix=f"fix {loaded.spec.implementation}, then: corerl doctor {loaded.name}",
        )
    else:
        yield ok(f"backend {loaded}: its hooks meet the contract")


def _environment(loaded: Loaded) -> Iterator[Finding]:
    """The environment of the backend's processes, with default options on one device of this machine."""
    spec: BackendSpec = loaded.spec
    import torch

    wanted = spec.environment(
        spec.config(), ClusterInfo(device="cuda" if torch.cuda.is_available() else "cpu", ranks=1)
    )
    if wanted:
        shown = " ".join(f"{variable}={value}" for variable, value in wanted.items())
        yield ok(f"backend {loaded}: by default its processes get {shown}")


def finding_of(error: PluginError, kind: Kind | None, name: str, entry: Entry | None = None) -> Finding:
    """The registry's error for an unusable plugin, of a kind that may be unknown, as a finding: why it matters and the
    command that fixes it."""
    useless = "it cannot be called" if kind is Kind.COMMANDS else "a run that selects it does not start"
    why = f"{useless}: {name!r} is not there"
    fix = " ".join(["corerl plugins", *([kind.value] if kind else [])]) + ", which lists the names that are installed"
    if isinstance(error, PluginNotFound):
        fix = error.install or fix
    elif isinstance(error, PluginConflict):
        why = "CoreRL does not choose between them, since the choice would depend on sys.path"
        fix = f"{PIP} uninstall the one you do not want, or use the longer name in the config"
    elif isinstance(error, PluginIncompatible):
        why = "it would get arguments, or be asked for results, that it was not written for"
        fix = f"{PIP} install --upgrade {'corerl' if error.api > API or entry is None else entry.distribution or 'it'}"
    elif isinstance(error, PluginBroken):
        why = useless
        fix = reinstall(entry) if entry is not None else f"fix {name}"
    return Finding(level=Level.ERROR, what=error.message + replaced(error), why=why, fix=fix)


def reinstall(entry: Entry) -> str:
    if not entry.distribution:
        return f"fix {entry.value}, searched in the installed packages and then in {sys.path[-1]}"
    return f"{PIP} install --force-reinstall {entry.distribution}"
