"""Match a config with its plugins on the driver: turn each plugin's table into its config class, and check what the run
asks of a plugin before any worker exists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, fields, frozen

from corerl.algorithms.base import REFERENCE
from corerl.config.schema import AlgorithmConfig, ClusterInfo, Config, ExtensionChoice, RewardConfig, RolesConfig
from corerl.config.structuring import structure
from corerl.config.toml_text import toml_key
from corerl.errors import ConfigError, CorerlError, PluginBroken, PluginError
from corerl.messages import install_hint, nearest, one_line
from corerl.plan.check import Problems
from corerl.plugin.capabilities import Capability
from corerl.plugin.registry import EXTRAS, Kind, Loaded, installed_names, load, locate, options_of, usable
from corerl.plugin.spec import ACTOR, AlgorithmRun, AlgorithmSpec, Problem, RoleKind, SamplerRun, SlowPath
from corerl.plugin.transports import AUTO

# The kinds with a table for each plugin.
TABLES = (Kind.BACKENDS, Kind.ENGINES, Kind.SAMPLERS, Kind.ALGORITHMS, Kind.TRANSPORTS, Kind.PICTURES)
ROLES = tuple(field.name for field in fields(RolesConfig))


@frozen(kw_only=True)
class Selection:
    """A plugin that a config names."""

    kind: Kind
    path: str  # the setting that names it
    name: str  # the setting's value
    used: bool  # its code runs; False for a sampler in a run that samples nothing


def selected(config: Config) -> list[Selection]:
    """The selected backends, engine, sampler, algorithm, extensions, transport and reader of pictures, in that order;
    one entry for each setting that names a plugin. Extensions that join by themselves are among them once
    `with_extensions` has listed them."""
    found: list[Selection] = []

    def add(kind: Kind, path: str, name: str, *, used: bool = True) -> None:
        found.append(Selection(kind=kind, path=path, name=name, used=used))

    roles = config.chosen_roles.items()
    backends = {f"roles.{role}.backend": choice.backend for role, choice in roles if choice.backend}
    add(Kind.BACKENDS, "backend.name", config.backend.name, used=len(backends) < len(roles))
    for path, name in backends.items():
        add(Kind.BACKENDS, path, name)
    if config.run.has_engines:  # ranks alone need none to be installed
        add(Kind.ENGINES, "rollout.engine", config.rollout.engine)
    add(Kind.SAMPLERS, "rollout.sampler", config.rollout.sampler, used=config.run.has_engines)
    if config.run.mode != "eval":  # from which nothing learns
        add(Kind.ALGORITHMS, "algorithm.name", config.algorithm.name, used=config.run.trains)
    for index, each in enumerate(config.chosen_extensions):
        add(Kind.EXTENSIONS, f"extensions[{index}].name", each.name)
    if config.weights.transport != AUTO:
        add(Kind.TRANSPORTS, "weights.transport", config.weights.transport, used=config.run.has_engines)
    if config.model.pictures:
        add(Kind.PICTURES, "model.pictures", config.model.pictures)
    return found


def distributions_of(config: Config) -> list[str]:
    """The distributions whose code a run of the config has, core's first; without plugins that are not installed."""
    found = ["corerl"]
    for each in selected(config):
        if each.used:
            with contextlib.suppress(PluginError):  # reported where it is loaded
                found.append(locate(each.kind, each.name).distribution)
    return found


def backend_name(config: Config, role: str) -> str:
    """The role's own backend if it names one, else the run's."""
    name: str = getattr(config.roles, role).backend or config.backend.name
    return name


def role_options(config: Config, role: str, backend: Loaded) -> Any:
    """The backend options of this role: its own table if it has one, else the backend's."""
    own = config.chosen_roles[role].options
    return config.backends[backend.name] if own is None else own


@frozen(kw_only=True)
class Plugins:
    """A run's plugins with their specs, each loaded once."""

    algorithm: Loaded | None  # None in a run that only scores
    backends: Mapping[str, Loaded]  # by role
    engine: Loaded | None  # None in a run that samples nothing
    sampler: Loaded
    transport: Loaded | None  # None for 'auto'
    extensions: tuple[Loaded, ...]  # as the config lists them
    pictures: Loaded | None = None  # None where rows have none
    kinds: Mapping[str, RoleKind]  # what each role is: of the algorithm, and the reference policy

    def is_critic(self, role: str) -> bool:
        """Whether `role` has a value head; the actor has none in any algorithm."""
        return role != ACTOR and self.kinds.get(role) is RoleKind.CRITIC

    def is_frozen(self, role: str) -> bool:
        """Whether `role` is never trained; every algorithm trains the actor."""
        return role != ACTOR and self.kinds.get(role) is RoleKind.FROZEN

    def supports(self, role: str, capability: Capability) -> bool:
        return bool(self.backends[role].spec.support(capability).full)


def plugins_of(config: Config) -> Plugins:
    """The plugins that a config names. Raises all that is wrong with them together."""
    found: dict[tuple[Kind, str], Loaded] = {}
    problems = Problems()
    for each in selected(config):
        with problems.stage(each.path):
            is_algorithm = each.kind is Kind.ALGORITHMS
            found[each.kind, each.name] = _algorithm(config) if is_algorithm else load(each.kind, each.name)
    problems.raise_all()
    algorithm = found.get((Kind.ALGORITHMS, config.algorithm.name))
    kinds = dict(algorithm.spec.roles) if algorithm is not None else {}
    return Plugins(
        algorithm=algorithm,
        backends={role: found[Kind.BACKENDS, backend_name(config, role)] for role in config.chosen_roles},
        engine=found.get((Kind.ENGINES, config.rollout.engine)),
        sampler=found[Kind.SAMPLERS, config.rollout.sampler],
        transport=found.get((Kind.TRANSPORTS, config.weights.transport)),
        extensions=tuple(found[Kind.EXTENSIONS, each.name] for each in config.chosen_extensions),
        pictures=found.get((Kind.PICTURES, config.model.pictures)),
        kinds={**kinds, REFERENCE: RoleKind.FROZEN} if config.roles.reference is not None else kinds,
    )


def settle_algorithm(config: Config) -> Config:
    """The same config with what `[algorithm]` leaves unset as the algorithm says, or, in a run that only scores, as
    all do. Raises PluginError if the algorithm cannot be loaded, or sets what it cannot."""
    defaults: dict[str, Any] = {}
    if config.run.mode != "eval":
        spec = _algorithm(config).spec
        defaults = dict(spec.defaults)
        if not config.run.has_engines or not spec.compares or config.algorithm.kl_in == "reward":
            defaults.pop("dynamic_sampling", None)  # where it has no use, a default gives way
    return evolve(config, algorithm=config.algorithm.settled(defaults, max_tokens=config.rollout.max_tokens))


def settle_reward(config: Config, sampler: Loaded) -> Config:
    """The same config with the sampler's own reward, if it has one and `[reward]` names none."""
    unnamed = config.reward.name == fields(RewardConfig).name.default and not config.reward.functions
    own: str = sampler.spec.reward
    return evolve(config, reward=evolve(config.reward, name=own)) if own and unnamed else config


def settle_extensions(config: Config) -> Config:
    """The same config with the installed extensions that join by default, if it says nothing of extensions."""
    return config if config.extensions is not None else evolve(config, extensions=_joining("default"))


def with_extensions(config: Config) -> Config:
    """The same config, once settled, with the installed extensions that join every run, behind those that it lists."""
    listed = [each.name for each in config.chosen_extensions]
    return evolve(config, extensions=(*config.chosen_extensions, *_joining("always", listed)))


def _joining(how: str, listed: Sequence[str] = ()) -> tuple[ExtensionChoice, ...]:
    """The installed extensions that join in this way, without those listed. Whoever loads them raises an error if two
    have one name."""
    # A list that chooses one of several of a name, as 'distribution:name', leaves the others out.
    chosen = {name.rpartition(":")[2] for name in listed}
    found = [each for each in usable(Kind.EXTENSIONS) if each.spec.joins == how]
    new = [each for each in found if each.name not in chosen and each.value not in listed]
    names = dict.fromkeys(each.name for each in sorted(new, key=lambda each: (each.spec.place, each.name)))
    return tuple(ExtensionChoice(name=name) for name in names)


def unshown() -> list[str]:
    """One line if no installed extension shows a run."""
    silent = not any(each.spec.shows_notices for each in usable(Kind.EXTENSIONS))
    return [f"no extension that shows a run is installed; {install_hint('observe')} brings one"] * silent


def _algorithm(config: Config) -> Loaded:
    """Raises PluginBroken if it has roles that no run has, or defaults that `[algorithm]` cannot have."""
    name = config.algorithm.name
    loaded = load(Kind.ALGORITHMS, name)
    spec: AlgorithmSpec = loaded.spec
    if wrong := [role for role in spec.roles if role not in ROLES]:
        raise PluginBroken(f"algorithm {name!r} wants the role {wrong[0]!r}; a run has {', '.join(ROLES)}")
    if spec.roles.get(ACTOR, RoleKind.FROZEN) is RoleKind.FROZEN:
        what = "freezes its" if ACTOR in spec.roles else "has no"
        raise PluginBroken(f"algorithm {name!r} {what} role {ACTOR!r}, but every run trains one")
    unset = [field.name for field in fields(AlgorithmConfig) if field.default is None]
    for setting, value in spec.defaults.items():
        if setting not in unset:
            raise PluginBroken(
                f"algorithm {name!r} sets algorithm.{setting}, which is never unset; it can set {', '.join(unset)}"
            )
        try:
            structure({setting: value}, AlgorithmConfig, path="algorithm")
        except ConfigError as error:
            raise PluginBroken(f"algorithm {name!r} has an invalid default: {error.message}") from error
    return loaded


def resolve_tables(config: Config) -> Config:
    """The same config, with the options of every selected plugin as an instance of its config class. Idempotent.

    Tables of unselected plugins stay as they are. One of a plugin that is not installed, but whose name is close to a
    known one, is a likely typo. Raises all that is wrong together.
    """
    problems = Problems()

    def own(options: Any, loaded: Loaded, path: str) -> Any:
        found = options  # as they are if they do not fit
        with problems.stage():
            found = options_of(loaded, options, path=path)
        return found  # noqa: RET504  -- the block ends early where they do not fit

    tables: dict[Kind, dict[str, Any]] = {kind: dict(getattr(config, kind.value)) for kind in TABLES}
    for each in selected(config):
        if each.kind in tables:
            loaded = load(each.kind, each.name)
            table = tables[each.kind]
            table[loaded.name] = own(table.get(loaded.name, {}), loaded, _table(each.kind, loaded.name))
    extensions = config.extensions and tuple(
        evolve(each, options=own(each.options, load(Kind.EXTENSIONS, each.name), f"extensions[{index}].options"))
        for index, each in enumerate(config.extensions)
    )
    roles: dict[str, Any] = {}
    for role, choice in config.chosen_roles.items():
        if choice.options is not None:
            backend = load(Kind.BACKENDS, backend_name(config, role))
            roles[role] = evolve(choice, options=own(choice.options, backend, f"roles.{role}.options"))
    for kind, name, meant in _unknown(config):
        if meant:
            problems.add(
                f"{_table(kind, name)}: no {kind.noun} {name!r} is installed; did you mean {meant!r}? Otherwise "
                "install it or remove the table"
            )
    problems.raise_all()
    changed: dict[str, Any] = {kind.value: table for kind, table in tables.items()}
    return evolve(config, **changed, roles=evolve(config.roles, **roles), extensions=extensions)


def filled_in(config: Config) -> Config:
    """The same config with a value for all that does not depend on models, data and devices."""
    return resolve_tables(settle_algorithm(settle_extensions(config)))


def ignored_tables(config: Config) -> list[str]:
    """One line for each table of a plugin that is not installed, but for likely typos, which `resolve_tables`
    reports."""
    found = []
    for kind, name, meant in _unknown(config):
        if not meant:
            extra = EXTRAS[kind].get(name)
            more = f"; {install_hint(extra)}" if extra else ""
            found.append(f"{_table(kind, name)} is ignored: no {kind.noun} {name!r} is installed{more}")
    return found


def check_spec(
    loaded: Loaded,
    options: Any,
    run: ClusterInfo | AlgorithmRun | SamplerRun,
    *,
    config: Config,
    role: str = ACTOR,
    table: str = "",
) -> None:
    """Ask a plugin's spec whether these options can run here; raise ConfigError with one line for each problem, and
    PluginBroken if the spec fails itself.

    Messages name settings by their path in the config: `config` and `role` locate the model and the [train] table that
    `run` describes. `table` is the path of the options; only an extension, whose path is an index, needs it.
    """
    try:
        problems = list(loaded.spec.check(options, run))
    except CorerlError:
        raise
    except Exception as error:
        noun = _kind_of(loaded).noun
        raise PluginBroken(f"{noun} {loaded} cannot check its options: {one_line(error)}") from error
    lines = [f"{place_of(each, loaded, config=config, role=role, table=table)}: {each.text}" for each in problems]
    if lines:
        raise ConfigError("\n".join(lines))


def place_of(said: Problem | SlowPath, loaded: Loaded, *, config: Config, role: str = ACTOR, table: str = "") -> str:
    """The path, in the user's config, of the setting that a spec says something about. `table` as in `check_spec`."""
    if not said.path.startswith("."):
        kind = _kind_of(loaded)
        if kind is Kind.BACKENDS and config.chosen_roles[role].options is not None:
            table = f"roles.{role}.options"
        own = table or _table(kind, loaded.name)
        return f"{own}.{said.path}" if said.path else own
    table, _, setting = said.path[1:].partition(".")
    if table in ("weights", "algorithm", "rollout"):
        place = table
    elif table == "train":
        place = config.train_table_of(role)
    else:
        place = config.model_table_of(role)
        if config.model_of(role).path:
            return f"{place}.path: {setting} in its config.json" if setting else f"{place}.path"
        place += ".config"
    return f"{place}.{setting}" if setting else place


def _kind_of(loaded: Loaded) -> Kind:
    return next(kind for kind in Kind if isinstance(loaded.spec, kind.spec))


def _unknown(config: Config) -> Iterator[tuple[Kind, str, str]]:
    """Each table of a plugin that is neither selected nor installed, with the plugin whose name is closest to its name;
    "" if none is close."""
    for kind in TABLES:
        given, there = getattr(config, kind.value), installed_names(kind)
        names = [each.name for each in selected(config) if each.kind is kind]
        chosen = {name if name in given else name.rpartition(":")[2] for name in names}
        known = [*(name.rpartition(":")[2] for name in names), *there]
        yield from ((kind, name, nearest(name, known)) for name in given if name not in chosen and name not in there)


def _table(kind: Kind, name: str) -> str:
    """The dotted path of a plugin's table, as TOML writes it."""
    return f"{kind.value}.{toml_key(name)}"
