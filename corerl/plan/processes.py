"""Plan a run's processes: the ranks of each role and the engines, their placement and environment, and how weights
reach engines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from corerl.cluster.arrangement import Placement, arrange
from corerl.config.options import GLOO_INTERFACE
from corerl.config.problems import Problems
from corerl.config.schema import ClusterConfig, ClusterInfo, Config
from corerl.config.toml_text import to_plain
from corerl.engines.base import EngineContext
from corerl.engines.service import EngineAssignment
from corerl.errors import ConfigError
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.check import uneven
from corerl.plan.models import RoleModel
from corerl.plan.residency import offloaded
from corerl.plan.resolve import Plugins, check_spec
from corerl.plan.roles import RolePlan, cluster_of, plan_role
from corerl.plugin import hooktrace
from corerl.plugin.capabilities import Capability
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Kind, Loaded, load
from corerl.plugin.spec import ACTOR, Environment
from corerl.plugin.transports import AUTO

ENGINES = "engines"  # name of the group of engine processes, next to the roles' names
USER = "cluster.environment"  # whose values may be secrets
JOINED = {"LD_PRELOAD": ":"}  # variables that hold a list, and its separator: several plugins may add to it


@frozen(kw_only=True)
class EnginePlan:
    """Everything needed to launch the engines."""

    name: str
    assignments: tuple[EngineAssignment, ...]  # one per replica; its devices are known once it has its slot
    environment: Mapping[str, str] = field(repr=False)  # may hold secrets
    calls: int  # `generate` calls that one replica answers concurrently


@frozen(kw_only=True)
class ProcessPlan:
    """The processes to launch."""

    device: str  # cpu or cuda
    roles: Mapping[str, RolePlan]  # the actor first
    engine: EnginePlan | None  # None if nothing is sampled
    separate_adapters: bool  # the engines hold the actor's adapters separately from its weights
    sharing: tuple[str, ...]  # roles that share devices with engines, and take turns with them in memory
    placement: Placement
    transport: str  # for weight updates
    transport_options: Mapping[str, Any]  # its own table, as plain data
    senders: tuple[int, ...]  # the actor's rank on each receiver's device; empty if one has none
    common: Mapping[str, str]  # the environment of all processes, besides their own


def plan_processes(
    config: Config,
    plugins: Plugins,
    problems: Problems,
    *,
    device: str,
    models: Mapping[str, RoleModel],
    run_dir: Path,
    resume: Path | None,
    context_length: int,
    algorithm: AlgorithmPlan | None,
) -> ProcessPlan | None:
    """Plan the processes of a config with resolved plugins; `context_length` is the most tokens of a sample (0:
    unlimited). None if there is any problem, new or found before; what builds on a plugin that is missing, or on
    options that do not fit it, is not checked then."""
    fit = {kind: problems.none_in(f"plugins.{kind.value}") for kind in Kind}
    actor = cluster_of(ACTOR, config, plugins, device=device, model=models.get(ACTOR))
    engines = evolve(actor, ranks=config.rollout.replicas, weights=config.weights)
    engine = plugins.engine if fit[Kind.ENGINES] else None
    groups, own, widths = groups_of(config)
    senders: tuple[int, ...] = ()
    if engine is not None and fit[Kind.BACKENDS] and fit[Kind.TRANSPORTS]:
        with problems.stage("weights.transport"):
            if config.run.samples:
                widths[ENGINES] = engine.spec.bundles(config.engines[engine.name], engines)
            senders = senders_of(config, arrange(groups, own_devices=own, widths=widths), device)
            name = choose_transport(config, senders, by_handle=plugins.supports(ACTOR, Capability.UPDATE_IPC))
            plugins = evolve(plugins, transport=load(Kind.TRANSPORTS, name))
            config = evolve(config, weights=evolve(config.weights, transport=name))
            check_transport(config, plugins, senders, actor)
    if engine is not None:
        with problems.stage("engines"):
            check_spec(engine, config.engines[engine.name], engines, config=config)
            require_form(config, engine)
    if fit[Kind.EXTENSIONS]:
        check_extensions(config, plugins, actor, problems)
    else:  # none is known to be there
        config, plugins = evolve(config, extensions=()), evolve(plugins, extensions=())
    plans: dict[str, RolePlan] = {}
    if fit[Kind.BACKENDS]:
        plans = plan_roles(
            config, plugins, problems, device=device, models=models, run_dir=run_dir, resume=resume, algorithm=algorithm
        )
    transport = plugins.transport
    if problems or algorithm is None or engine is None or transport is None:
        return None
    common = process_environment(config.cluster, device=device, transport=transport)
    with problems.stage("environment"):
        plans = {role: with_environment(plan, config.cluster, common) for role, plan in plans.items()}
    engine_plan: EnginePlan | None = None
    resources = [plan.resources for plan in plans.values()]
    if config.run.samples:
        context = engine_context(
            config, device=device, context_length=context_length, bundles=widths[ENGINES], run_dir=run_dir
        )
        with problems.stage("environment"):
            engine_plan = plan_engines(config, engine, transport, engines, context, common)
        resources.append(engine.spec.resources(config.engines[engine.name], engines))
    if problems:
        return None
    return ProcessPlan(
        device=device,
        separate_adapters=separate_adapters(config),
        roles=plans,
        engine=engine_plan,
        sharing=offloaded(config, device),
        placement=arrange(
            groups,
            own_devices=own,
            widths=widths,
            cpus=max(each.cpus for each in resources),
            gpus=max(each.gpus for each in resources),
            resources=config.cluster.resources,
        ),
        transport=config.weights.transport,
        transport_options=to_plain(config.transports.get(transport.name, {})),
        senders=senders,
        common=common,
    )


def groups_of(config: Config) -> tuple[dict[str, int], list[str], dict[str, int]]:
    """The groups of a run's processes by name: how many members each has, those that have devices of their own, and the
    widths of members, which only the engine knows if there are engines."""
    groups = {role: choice.ranks for role, choice in config.chosen_roles.items()}
    own = list(config.own_devices)
    if config.run.samples:
        groups[ENGINES] = config.rollout.replicas
        own += [ENGINES] if config.cluster.placement == "disaggregated" else []
    return groups, own, {}


def plan_roles(
    config: Config,
    plugins: Plugins,
    problems: Problems,
    *,
    device: str,
    models: Mapping[str, RoleModel],
    run_dir: Path,
    resume: Path | None,
    algorithm: AlgorithmPlan | None,
) -> dict[str, RolePlan]:
    """The plans of the roles that have no problem, without the environment that all processes share."""
    plans: dict[str, RolePlan] = {}
    for role in config.chosen_roles:
        with problems.stage(f"roles.{role}", path=f"roles.{role}"):
            plan = plan_role(
                role,
                config,
                plugins,
                device=device,
                run_dir=str(run_dir),
                resume=str(resume / role) if resume else "",
                model=models.get(role),
                snapshots=algorithm.snapshots(role) if algorithm is not None and config.run.trains else {},
            )
            plans[role] = evolve(plan, objective=algorithm.objectives.get(role) if algorithm is not None else None)
            line = uneven(role, config, data_parallel=plan.data_parallel)
            if line and not plugins.is_frozen(role):
                problems.add(line)
    return plans


# ---- engines ---------------------------------------------------------------------------------------------------------


def engine_context(config: Config, *, device: str, context_length: int, bundles: int, run_dir: Path) -> EngineContext:
    """What all replicas share."""
    return EngineContext(
        name="engine",
        index=0,
        device=device,
        precision=config.train_of(ACTOR).precision,
        context_length=context_length,
        bundles=bundles,
        run_dir=str(run_dir),
        weights=config.weights,
        lora=config.lora if separate_adapters(config) else None,
    )


def plan_engines(
    config: Config,
    engine: Loaded,
    transport: Loaded,
    cluster: ClusterInfo,
    context: EngineContext,
    common: Mapping[str, str],
) -> EnginePlan:
    """Plan the replicas, which differ from `context` in their names and numbers. Raises ConfigError if the engine wants
    an environment that it cannot have."""
    options = config.engines[engine.name]
    wanted = engine.spec.environment(options, cluster)
    return EnginePlan(
        name=engine.name,
        assignments=tuple(
            EngineAssignment(
                engine=config.rollout.engine,
                transport=transport.name,
                origins=origins_of((Kind.ENGINES, engine), (Kind.TRANSPORTS, transport)),
                model=config.model,
                options=to_plain(options),
                context=evolve(context, name=f"engine-{index}", index=index),
            )
            for index in range(config.rollout.replicas)
        ),
        environment=environment_of(engine.name, wanted, cluster=config.cluster, common=common),
        calls=engine.spec.calls(options, cluster),
    )


def require_form(config: Config, engine: Loaded) -> None:
    """Raise ConfigError if weights would be sent in a form that the engine does not take."""
    if not config.run.samples:
        return
    sent, taken = config.weights.quantize, engine.spec.quantized
    if sent not in taken:
        raise ConfigError(f"weights.quantize: {sent!r}, but the engine {engine.name!r} takes {' or '.join(taken)}")
    if separate_adapters(config) and not engine.spec.adapters:
        raise ConfigError(
            f"weights.lora: 'adapter', but the engine {engine.name!r} cannot hold adapters apart from its weights; set "
            "it to 'merged'"
        )


def separate_adapters(config: Config) -> bool:
    return config.lora is not None and config.weights.lora == "adapter"


def check_extensions(config: Config, plugins: Plugins, cluster: ClusterInfo, problems: Problems) -> None:
    names: dict[str, str] = {}  # extension -> its name in the config
    for index, (each, loaded) in enumerate(zip(config.chosen_extensions, plugins.extensions, strict=True)):
        with problems.stage("extensions"):
            if names.setdefault(loaded.name, each.name) != each.name:
                raise ConfigError(f"extensions: {each.name!r} and {names[loaded.name]!r} share a name; keep one")
            check_spec(loaded, each.options, cluster, config=config, table=f"extensions[{index}].options")


# ---- how weights reach engines ---------------------------------------------------------------------------------------


def senders(receivers: Sequence[int], ranks: Sequence[int], *, one_machine: bool) -> tuple[int, ...]:
    """For each receiver, the actor's rank that can share memory with it: the one on its bundle. `receivers` and `ranks`
    are bundle indices. On the CPUs of `one_machine` it is rank 0 for all. Empty if any receiver has none.
    """
    if one_machine:
        return (0,) * len(receivers)
    at = {bundle: rank for rank, bundle in enumerate(ranks)}
    return tuple(at[bundle] for bundle in receivers) if all(bundle in at for bundle in receivers) else ()


def senders_of(config: Config, placement: Placement, device: str) -> tuple[int, ...]:
    """For each receiver the actor's rank on its device (see `ProcessPlan.senders`)."""
    places = placement.places
    receivers = [bundle for place in places.get(ENGINES, ()) for bundle in placement.taken(ENGINES, place)]
    return senders(receivers, places[ACTOR], one_machine=device == "cpu" and not config.cluster.address)


def choose_transport(config: Config, senders: Sequence[int], *, by_handle: bool) -> str:
    """The name of the transport: as configured, or by where ranks and engines are. `by_handle`: whether the actor's
    backend can share memory by handle."""
    if config.weights.transport != AUTO:
        return config.weights.transport
    return "ipc" if by_handle and senders and config.cluster.placement == "colocated" else "collective"


def check_transport(config: Config, plugins: Plugins, senders: Sequence[int], cluster: ClusterInfo) -> None:
    """Raise ConfigError if the chosen transport works within a device, as 'ipc' does, and an engine is on a device
    without a rank, or for what its spec finds."""
    loaded = plugins.transport
    assert loaded is not None
    if loaded.spec.one_device and config.run.samples and not senders:
        raise ConfigError(
            f"weights.transport: {config.weights.transport!r} shares memory within one device, but an engine is on a "
            f"device without {ACTOR} ranks; use 'auto', or colocated engines, at most one per rank"
        )
    check_spec(loaded, config.transports.get(loaded.name, {}), cluster, config=config)


# ---- environment -----------------------------------------------------------------------------------------------------


def with_environment(plan: RolePlan, cluster: ClusterConfig, common: Mapping[str, str]) -> RolePlan:
    own = environment_of(plan.backend.name, plan.environment, cluster=cluster, common=common)
    return evolve(plan, environment=own)


def process_environment(cluster: ClusterConfig, *, device: str, transport: Loaded | None) -> dict[str, str]:
    """The environment that every process of a run gets before it imports anything. `transport` is that of its weight
    updates; None if it is not known."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if path := os.environ.get("PYTHONPATH"):  # that of a cluster's Ray may be another
        environment["PYTHONPATH"] = path
    if hooktrace.wanted():
        environment[hooktrace.VARIABLE] = os.environ[hooktrace.VARIABLE]
    if not cluster.address:
        environment[GLOO_INTERFACE] = "lo"  # one machine: no other interface need be up or trusted
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # one core per process: more threads than cores only compete
    elif transport is not None and transport.spec.joins and cluster.placement == "disaggregated":
        # Ranks and engines share an NCCL group, which needs equal settings everywhere; engines turn these off.
        environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return environment


def environment_of(
    plugin: str, wanted: Mapping[str, str], *, cluster: ClusterConfig, common: Mapping[str, str]
) -> dict[str, str]:
    """The environment for one plugin's processes; the user's values replace those `common` to all processes.

    Raises ConfigError if the plugin wants another value.
    """
    user = {**cluster.environment, **{name: os.environ[name] for name in cluster.secrets}}
    own = {name: value for name, value in common.items() if name not in user}
    return merge_environments(("corerl", own), (USER, user), (plugin, wanted))


def merge_environments(*environments: tuple[str, Environment]) -> dict[str, str]:
    """Merge (plugin, environment) pairs into one environment. LD_PRELOAD is joined, in the order given.

    Raises ConfigError if two plugins want different values of one variable.
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
                own, other = (
                    "another value" if each == USER else repr(text)
                    for each, text in ((owners[variable], merged[variable]), (owner, value))
                )
                raise ConfigError(
                    f"environment variable {variable}: {owners[variable]} needs {own}, but {owner} needs {other}; "
                    "they cannot share a process, so choose one of them"
                )
    return merged
