"""Plan a run's processes: the ranks of each role and the engines, their placement and environment, and how weights
reach engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from corerl.cluster.arrangement import Placement, arrange
from corerl.config.schema import EXPERTS, ClusterInfo, Config
from corerl.config.toml_text import to_plain
from corerl.engines.base import EngineContext
from corerl.engines.service import EngineAssignment
from corerl.errors import ConfigError
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.check import Problems
from corerl.plan.environment import environment_of, process_environment
from corerl.plan.models import RoleModel
from corerl.plan.residency import offloaded
from corerl.plan.resolve import Plugins, check_spec
from corerl.plan.roles import RolePlan, cluster_of, plan_role
from corerl.plugin.capabilities import Capability
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Kind, Loaded, load, usable
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import AUTO

ENGINES = "engines"  # name of the group of engine processes, next to the roles' names


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
    colocated_roles: tuple[str, ...]  # roles that share devices with engines, and take turns with them in memory
    placement: Placement
    transport: str  # for weight updates; as configured, where there are none
    transport_options: Mapping[str, Any]  # its own table, as plain data
    colocated_ranks: tuple[int, ...]  # the actor's rank on each receiver's device; empty if one has none
    common: Mapping[str, str]  # the environment of all processes, besides their own
    environment: Mapping[str, str] = field(repr=False)  # of those that a sampler starts; may hold secrets


def plan_processes(
    config: Config,
    plugins: Plugins,
    *,
    device: str,
    models: Mapping[str, RoleModel],
    run_dir: str,
    resume: Mapping[str, str],
    context_length: int,
    algorithm: AlgorithmPlan | None = None,
) -> ProcessPlan:
    """Plan the processes of a resolved config for the roles of `models`, the actor first unless a role is alone.
    `resume`: role -> its directory in a checkpoint; `context_length`: most tokens of a sample, or 0. Raises all
    problems."""
    problems = Problems()
    first = next(iter(models))
    cluster = cluster_of(first, config, plugins, device=device, model=models[first])
    groups = {role: config.chosen_roles[role].ranks for role in models}
    own, widths, colocated_ranks = list(config.own_devices), dict[str, int](), tuple[int, ...]()
    if (engine := plugins.engine) is not None:
        engines = evolve(cluster, ranks=config.rollout.replicas, weights=config.weights)
        groups[ENGINES] = config.rollout.replicas
        widths[ENGINES] = engine.spec.bundles(config.engines[engine.name], engines)
        if config.cluster.placement == "disaggregated":
            own.append(ENGINES)
        colocated_ranks = colocated_ranks_of(config, arrange(groups, own_devices=own, widths=widths), device)
        config, plugins = with_transport(config, plugins, colocated_ranks)
        check_engines(config, plugins, engines, cluster, colocated_ranks, problems)
    check_extensions(config, plugins, cluster, problems)
    transport = plugins.transport
    common = process_environment(config.cluster, device=device, transport=transport)
    roles: dict[str, RolePlan] = {}
    for role, model in models.items():
        with problems.stage(f"roles.{role}"):
            roles[role] = plan_role(
                role,
                config,
                plugins,
                device=device,
                run_dir=run_dir,
                resume=resume.get(role, ""),
                model=model,
                algorithm=algorithm,
                common=common,
            )
    problems.raise_all()
    engine_plan: EnginePlan | None = None
    if engine is not None:
        engine_plan = plan_engines(config, plugins, engines, common, context_length=context_length, run_dir=run_dir)
    return ProcessPlan(
        device=device,
        separate_adapters=separate_adapters(config),
        roles=roles,
        engine=engine_plan,
        colocated_roles=offloaded(config, device),
        placement=arrange(
            groups,
            own_devices=own,
            widths=widths,
            gpus=1.0 if device == "cuda" else 0.0,
            resources=config.cluster.resources,
        ),
        transport=config.weights.transport,
        transport_options={} if transport is None else to_plain(config.transports.get(transport.name, {})),
        colocated_ranks=colocated_ranks,
        common=common,
        environment=environment_of(
            "the sampler",
            {},
            cluster=config.cluster,
            common={name: value for name, value in common.items() if name == "PYTHONPATH"},
        ),
    )


# ---- engines ---------------------------------------------------------------------------------------------------------


def plan_engines(
    config: Config,
    plugins: Plugins,
    cluster: ClusterInfo,
    common: Mapping[str, str],
    *,
    context_length: int,
    run_dir: str,
) -> EnginePlan:
    """Plan the replicas. Raises ConfigError if the engine wants an environment that it cannot have."""
    engine, transport = plugins.engine, plugins.transport
    assert engine is not None and transport is not None  # chosen
    options = config.engines[engine.name]
    used = [(Kind.ENGINES, engine), (Kind.TRANSPORTS, transport)]
    if plugins.pictures is not None:
        used.append((Kind.PICTURES, plugins.pictures))
    return EnginePlan(
        name=engine.name,
        assignments=tuple(
            EngineAssignment(
                engine=config.rollout.engine,
                transport=transport.name,
                origins=origins_of(*used),
                model=config.model,
                options=to_plain(options),
                context=EngineContext(
                    name=f"engine-{index}",
                    index=index,
                    device=cluster.device,
                    precision=config.train_of(ACTOR).precision,
                    context_length=context_length,
                    bundles=engine.spec.bundles(options, cluster),
                    run_dir=run_dir,
                    weights=config.weights,
                    lora=config.lora if separate_adapters(config) else None,
                ),
            )
            for index in range(config.rollout.replicas)
        ),
        environment=environment_of(
            engine.name, engine.spec.environment(options, cluster), cluster=config.cluster, common=common
        ),
        calls=engine.spec.calls(options, cluster),
    )


def check_engines(
    config: Config,
    plugins: Plugins,
    engines: ClusterInfo,
    cluster: ClusterInfo,
    colocated_ranks: Sequence[int],
    problems: Problems,
) -> None:
    """What the engine, and the transport of its updates, cannot do."""
    engine, transport = plugins.engine, plugins.transport
    assert engine is not None and transport is not None  # chosen
    with problems.stage():
        check_transport(config, transport, colocated_ranks, cluster)
    with problems.stage():
        check_spec(engine, config.engines[engine.name], engines, config=config)
    problems.add(*against_engine(config, engine))


def against_engine(config: Config, engine: Loaded) -> Iterator[str]:
    """A line for each form of weights, and of rows, that the engine does not take."""
    wanted, taken = config.weights.quantize, engine.spec.quantized
    if wanted not in taken:
        yield f"weights.quantize: {wanted!r}, but the engine {engine.name!r} takes {' or '.join(taken)}"
    if separate_adapters(config) and not engine.spec.adapters:
        yield (
            f"weights.lora: 'adapter', but the engine {engine.name!r} cannot hold adapters apart from its weights; set "
            "it to 'merged'"
        )
    elif separate_adapters(config) and config.lora is not None and config.lora.of_experts:
        yield (
            f"weights.lora: 'adapter', but [lora] has the target {EXPERTS!r}, whose adapters no engine holds apart; "
            "set it to 'merged'"
        )
    if config.model.pictures and not engine.spec.pictures:
        can = [each.name for each in usable(Kind.ENGINES) if each.spec.pictures]
        yield (
            f"model.pictures: {config.model.pictures!r}, but the engine {engine.name!r} shows the model no pictures; "
            f"set rollout.engine to one that does ({', '.join(can) or 'none is installed'}), or remove this"
        )


def separate_adapters(config: Config) -> bool:
    return config.lora is not None and config.weights.lora == "adapter"


def check_extensions(config: Config, plugins: Plugins, cluster: ClusterInfo, problems: Problems) -> None:
    names: dict[str, str] = {}  # extension -> its name in the config
    for index, (each, loaded) in enumerate(zip(config.chosen_extensions, plugins.extensions, strict=True)):
        with problems.stage():
            if loaded.name in names:
                raise ConfigError(f"extensions: {each.name!r} and {names[loaded.name]!r} share a name; keep one")
            names[loaded.name] = each.name
            check_spec(loaded, each.options, cluster, config=config, table=f"extensions[{index}].options")


# ---- how weights reach engines ---------------------------------------------------------------------------------------


def colocated_ranks_of(config: Config, placement: Placement, device: str) -> tuple[int, ...]:
    """For each receiver the actor's rank on its device (see `ProcessPlan.colocated_ranks`)."""
    places = placement.places
    receivers = [bundle for place in places[ENGINES] for bundle in placement.taken(ENGINES, place)]
    return ranks_on(receivers, places[ACTOR], one_machine=device == "cpu" and not config.cluster.address)


def ranks_on(receivers: Sequence[int], ranks: Sequence[int], *, one_machine: bool) -> tuple[int, ...]:
    """For each receiver, the actor's rank that can share memory with it: the one on its bundle. `receivers` and `ranks`
    are bundle indices. On the CPUs of `one_machine` it is rank 0 for all. Empty if any receiver has none.
    """
    if one_machine:
        return (0,) * len(receivers)
    at = {bundle: rank for rank, bundle in enumerate(ranks)}
    return tuple(at[bundle] for bundle in receivers) if all(bundle in at for bundle in receivers) else ()


def with_transport(config: Config, plugins: Plugins, colocated_ranks: Sequence[int]) -> tuple[Config, Plugins]:
    """Those of the transport that the run has. Raises ConfigError if it is not installed."""
    name = choose_transport(config, colocated_ranks, by_handle=plugins.supports(ACTOR, Capability.UPDATE_IPC))
    problems = Problems()
    with problems.stage("weights.transport"):
        plugins = evolve(plugins, transport=load(Kind.TRANSPORTS, name))
    problems.raise_all()
    return evolve(config, weights=evolve(config.weights, transport=name)), plugins


def choose_transport(config: Config, colocated_ranks: Sequence[int], *, by_handle: bool) -> str:
    """The name of the transport: as configured, or by where ranks and engines are. `by_handle`: whether the actor's
    backend can share memory by handle."""
    if config.weights.transport != AUTO:
        return config.weights.transport
    return "ipc" if by_handle and colocated_ranks and config.cluster.placement == "colocated" else "collective"


def check_transport(config: Config, loaded: Loaded, colocated_ranks: Sequence[int], cluster: ClusterInfo) -> None:
    """Raise ConfigError if the chosen transport works within a device, as 'ipc' does, and an engine is on a device
    without a rank, or for what its spec finds."""
    if loaded.spec.one_device and not colocated_ranks:
        raise ConfigError(
            f"weights.transport: {config.weights.transport!r} shares memory within one device, but an engine is on a "
            f"device without {ACTOR} ranks; use 'auto', or colocated engines, at most one per rank"
        )
    check_spec(loaded, config.transports.get(loaded.name, {}), cluster, config=config)
