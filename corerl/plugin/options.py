"""Bring a config and its plugins together on the driver: each plugin's table becomes its own class, and what the run
asks of a plugin is checked before a worker exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, frozen

from corerl.config.load import structure
from corerl.config.schema import ClusterInfo, Config
from corerl.errors import ConfigError, PluginError, Unsupported
from corerl.messages import nearest
from corerl.plugin.capabilities import Capability, refusal
from corerl.plugin.registry import Kind, Loaded, installed_names, load
from corerl.plugin.spec import BackendSpec, Environment, Problem

JOINED = {"LD_PRELOAD": ":"}  # variables that hold a list, with its separator: several plugins may add to one


@frozen(kw_only=True)
class Selection:
    """A plugin that a config names."""

    kind: Kind
    path: str  # of the setting
    name: str  # as it stands there
    used: bool  # its code runs: not that of an engine where nothing is sampled


def selected(config: Config) -> list[Selection]:
    """Selections of backends, engine, extensions, in that order; a plugin is there as often as settings name it."""
    roles = config.chosen_roles.items()
    backends = {f"roles.{role}.backend": choice.backend for role, choice in roles if choice.backend}
    common = len(backends) < len(roles)
    return [
        Selection(kind=Kind.BACKENDS, path="backend.name", name=config.backend.name, used=common),
        *(Selection(kind=Kind.BACKENDS, path=path, name=name, used=True) for path, name in backends.items()),
        Selection(kind=Kind.ENGINES, path="rollout.engine", name=config.rollout.engine, used=config.run.samples),
        *(
            Selection(kind=Kind.EXTENSIONS, path=f"extensions[{index}].name", name=each.name, used=True)
            for index, each in enumerate(config.extensions)
        ),
    ]


def backend_name(config: Config, role: str) -> str:
    """The backend that a role names, or the run's."""
    name: str = getattr(config.roles, role).backend or config.backend.name
    return name


def role_options(config: Config, role: str, backend: Loaded) -> Any:
    """What `backend` is told for this role: its own table where the role has one, else the backend's."""
    own = config.chosen_roles[role].options
    return config.backends[backend.name] if own is None else own


def resolve_tables(config: Config) -> Config:
    """The same config, with the options of every selected plugin as that plugin's own class.

    Tables of backends and engines that are not selected stay as they are, and are checked if the plugin is installed;
    where it is not, and has nearly the name of one that is, that one is meant.
    Resolving twice changes nothing. Raises PluginError where a selected plugin cannot be loaded, and ConfigError with
    one line for each problem in a table.
    """
    lines: list[str] = []
    tables: dict[Kind, dict[str, Any]] = {Kind.BACKENDS: dict(config.backends), Kind.ENGINES: dict(config.engines)}
    for kind, name in dict.fromkeys((each.kind, each.name) for each in selected(config) if each.kind in tables):
        loaded = load(kind, name)
        table = tables[kind].get(loaded.name, {})
        tables[kind][loaded.name] = _options(table, loaded, path=_table(kind, loaded.name), lines=lines)
    extensions = tuple(
        evolve(
            choice,
            options=_options(
                choice.options, load(Kind.EXTENSIONS, choice.name), path=f"extensions[{index}].options", lines=lines
            ),
        )
        for index, choice in enumerate(config.extensions)
    )
    roles: dict[str, Any] = {
        role: evolve(
            choice,
            options=_options(
                choice.options,
                load(Kind.BACKENDS, backend_name(config, role)),
                path=f"roles.{role}.options",
                lines=lines,
            ),
        )
        for role, choice in config.chosen_roles.items()
        if choice.options is not None
    }
    for kind, name, plugin in _unselected(config):
        if isinstance(plugin, Loaded):
            _options(tables[kind][name], plugin, path=_table(kind, name), lines=lines)
        elif not plugin and (meant := _meant(config, kind, name)):
            lines.append(
                f"{_table(kind, name)}: no {kind.noun} {name!r} is installed; did you mean {meant!r}? "
                "Else install it, or remove the table"
            )
    if lines:
        raise ConfigError("\n".join(lines))
    return evolve(
        config,
        backends=tables[Kind.BACKENDS],
        engines=tables[Kind.ENGINES],
        roles=evolve(config.roles, **roles),
        extensions=extensions,
    )


def notes(config: Config) -> list[str]:
    """One line for each table that could not be checked, since its plugin is not selected and cannot be loaded. Those
    that `resolve_tables` takes for a slip are its to tell."""
    found = []
    for kind, name, plugin in _unselected(config):
        if isinstance(plugin, Loaded) or (not plugin and _meant(config, kind, name)):
            continue
        found.append(f"{_table(kind, name)} is ignored: {plugin or f'no {kind.noun} {name!r} is installed'}")
    return found


def check_capabilities(spec: BackendSpec, needs: Mapping[Capability, str], *, name: str = "") -> None:
    """Compare what a run asks of a backend (capability -> what in the config asks for it) with what it declares.

    Raises Unsupported with one line for each that it does not have. `name` is the backend's, for the message.
    """
    lines = []
    for capability, asked_by in needs.items():
        support = spec.support(capability)
        if not support.full:
            lines.append(refusal(capability, support, asked_by=asked_by, backend=name or spec.implementation))
    if lines:
        raise Unsupported("\n".join(lines))


def check_spec(
    loaded: Loaded,
    options: Any,
    cluster: ClusterInfo,
    *,
    config: Config | None = None,
    role: str = "actor",
    table: str = "",
) -> None:
    """Ask a plugin's spec whether these options can run here; ConfigError with a line for each problem.

    `config` and `role` tell where the model and the [train] table stand that `cluster` describes. `table` is where the
    options stand, which only an extension's place in its list tells.
    """
    kind = Kind.BACKENDS if isinstance(loaded.spec, BackendSpec) else Kind.ENGINES
    if kind is Kind.BACKENDS and config is not None and config.chosen_roles[role].options is not None:
        table = f"roles.{role}.options"
    own = table or _table(kind, loaded.name)
    lines = [f"{_place(each, own, config, role)}: {each.text}" for each in loaded.spec.check(options, cluster)]
    if lines:
        raise ConfigError("\n".join(lines))


def _place(problem: Problem, own: str, config: Config | None, role: str) -> str:
    """Where the user finds the setting."""
    if not problem.path.startswith("."):
        return f"{own}.{problem.path}" if problem.path else own
    table, _, setting = problem.path[1:].partition(".")
    if table == "weights":
        place = "weights"
    elif table == "train":
        place = config.train_table_of(role) if config else "train"
    else:
        place = config.model_table_of(role) if config else "model"
        if config and config.model_of(role).path:
            return f"{place}.path: {setting} in its config.json" if setting else f"{place}.path"
        place += ".config"
    return f"{place}.{setting}" if setting else place


def merge_environments(*environments: tuple[str, Environment]) -> dict[str, str]:
    """One environment of several (plugin, environment) pairs. LD_PRELOAD is joined, in the order given.

    Raises ConfigError where two plugins want different values of one variable.
    """
    merged: dict[str, str] = {}
    owners: dict[str, str] = {}
    for owner, environment in environments:
        for variable, value in environment.items():
            if variable not in merged:
                merged[variable], owners[variable] = value, owner
            elif variable in JOINED:
                separator = JOINED[variable]
                parts = [*merged[variable].split(separator), *value.split(separator)]
                merged[variable] = separator.join(dict.fromkeys(parts))
            elif merged[variable] != value:
                raise ConfigError(
                    f"environment variable {variable}: {owners[variable]} wants {merged[variable]!r}, "
                    f"{owner} wants {value!r}; these two cannot share a process, choose one of them"
                )
    return merged


def _unselected(config: Config) -> Iterator[tuple[Kind, str, Loaded | str]]:
    """Each table that no choice uses, with its plugin, or why there is none ("" where it is not installed)."""
    for kind in (Kind.BACKENDS, Kind.ENGINES):
        given, known = getattr(config, kind.value), installed_names(kind)
        names = [each.name for each in selected(config) if each.kind is kind]
        chosen = {name if name in given else name.rpartition(":")[2] for name in names}
        for name in given:
            if name in chosen:
                continue
            if name not in known:
                yield kind, name, ""
                continue
            try:
                yield kind, name, load(kind, name)
            except PluginError as error:
                yield kind, name, error.message


def _meant(config: Config, kind: Kind, name: str) -> str:
    """The plugin, selected or installed, whose name is nearly `name`, which is none; "" where there is none."""
    chosen = [each.name.rpartition(":")[2] for each in selected(config) if each.kind is kind]
    return nearest(name, [*chosen, *installed_names(kind)])


def _options(table: Any, loaded: Loaded, *, path: str, lines: list[str]) -> Any:
    """`table` as the plugin's config class; where it does not fit, the problems join `lines` and it stays as it is."""
    cls = loaded.spec.config
    if isinstance(table, cls):
        return table
    try:
        return structure(table, cls, path=path)
    except ConfigError as error:
        lines += error.message.splitlines()
        return table


def _table(kind: Kind, name: str) -> str:
    """The dotted path of a plugin's table, as TOML writes it."""
    key = name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'
    return f"{kind.value}.{key}"
