"""Plan a run's processes: the ranks of each role and the engines, their placement, and how weights reach engines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.cluster.arrangement import Placement, arrange
from corerl.config.load import to_plain
from corerl.config.problems import Problems
from corerl.config.schema import ClusterInfo, Config
from corerl.engines.base import EngineContext
from corerl.engines.service import EngineAssignment
from corerl.errors import ConfigError
from corerl.models.config import experts
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.check import uneven
from corerl.plan.environment import environment_of, process_environment
from corerl.plan.resolve import check_spec, is_frozen
from corerl.plan.roles import RolePlan, cluster_of, offloaded, plan_role
from corerl.plan.transports import ENGINES, transport_of
from corerl.plugin.fingerprint import origins_of
from corerl.plugin.registry import Kind, Loaded, load
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import AUTO

if TYPE_CHECKING:
    from corerl.models.layouts import Layout


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
    adapters_apart: bool  # the engines hold the actor's adapters beside its weights
    sharing: tuple[str, ...]  # roles that share devices with engines, and take turns with them in memory
    placement: Placement
    transport: str  # for weight updates
    transport_options: Mapping[str, Any]  # its own table, as plain data
    senders: tuple[int, ...]  # the actor's rank on each receiver's device; empty if one has none
    common: Mapping[str, str]  # the environment of all processes, besides their own


def plan_processes(
    config: Config,
    problems: Problems,
    *,
    device: str,
    models: Mapping[str, PreTrainedConfig],
    built: Mapping[str, PreTrainedModel],
    layouts: Mapping[str, Layout],
    run_dir: Path,
    resume: Path | None,
    context_length: int,
    algorithm: AlgorithmPlan | None,
) -> ProcessPlan | None:
    """Plan the processes of a config with resolved plugins; `models` holds the valid roles' model configs, `built` the
    models on meta, `layouts` the ways through them, `context_length` the most tokens of a sample (0: unlimited),
    `algorithm` says how each role is trained. None if there is any problem, new or found before; what builds on a
    plugin that is missing, or on options that do not fit it, is not checked then."""
    from corerl.models.build import stored_buffers  # slow to import: takes seconds

    fields = {role: hf.to_dict() for role, hf in models.items()}
    clusters = {role: cluster_of(role, config, device=device, model=fields.get(role)) for role in config.chosen_roles}
    fit = {kind: problems.none_in(f"plugins.{kind.value}") for kind in Kind}
    engines = evolve(clusters[ACTOR], ranks=config.rollout.replicas, weights=config.weights)
    groups = {role: choice.ranks for role, choice in config.chosen_roles.items()}
    own_devices = list(config.own_devices)
    widths: dict[str, int] = {}
    transport: str = config.weights.transport if fit[Kind.TRANSPORTS] else AUTO
    sending_by: Loaded | None = None
    sending: tuple[int, ...] = ()
    engine = load(Kind.ENGINES, config.rollout.engine) if fit[Kind.ENGINES] else None
    if engine is not None and fit[Kind.BACKENDS] and fit[Kind.TRANSPORTS]:
        with problems.stage("weights.transport"):
            if config.run.samples:
                groups[ENGINES] = config.rollout.replicas
                widths[ENGINES] = engine.spec.bundles(config.engines[engine.name], engines)
                own_devices += [ENGINES] if config.cluster.placement == "disaggregated" else []
            transport, sending = transport_of(config, arrange(groups, own_devices=own_devices, widths=widths), device)
            sending_by = load(Kind.TRANSPORTS, transport)
            check_spec(sending_by, config.transports.get(sending_by.name, {}), clusters[ACTOR], config=config)
    if engine is not None:
        with problems.stage("engines"):
            check_spec(engine, config.engines[engine.name], engines, config=config)
            require_form(config, engine, engines)
    if fit[Kind.EXTENSIONS]:
        check_extensions(config, clusters[ACTOR], problems)
    chosen = evolve(config, weights=evolve(config.weights, transport=transport))
    if not fit[Kind.EXTENSIONS]:
        chosen = evolve(chosen, extensions=())  # none is known to be there
    plans: dict[str, RolePlan] = {}
    for role in config.chosen_roles if fit[Kind.BACKENDS] else ():
        with problems.stage(f"roles.{role}", path=f"roles.{role}"):
            plans[role] = plan_role(
                role,
                chosen,
                experts=experts(models[role]) if role in models else 1,
                buffer=next(iter(stored_buffers(built[role])), "") if role in built else "",
                device=device,
                run_dir=str(run_dir),
                resume=str(resume / role) if resume else "",
                model=fields.get(role),
                layout=layouts[role].name if role in layouts else None,
                snapshots=algorithm.snapshots(role) if algorithm is not None and config.run.trains else {},
            )
            if not is_frozen(config, role) and (line := uneven(role, config, data_parallel=plans[role].data_parallel)):
                problems.add(line)
    if problems or algorithm is None or engine is None or sending_by is None:
        return None
    common = process_environment(cluster=config.cluster, device=device, transport=transport)
    environment = functools.partial(environment_of, cluster=config.cluster, common=common)
    for role, plan in plans.items():
        with problems.stage("environment"):
            own = environment(plan.backend.name, plan.environment)
            plans[role] = evolve(plan, environment=own, objective=algorithm.objectives.get(role))
    resources = [plan.resources for plan in plans.values()]
    engine_plan: EnginePlan | None = None
    if config.run.samples:
        context = EngineContext(
            name="engine",
            index=0,
            device=device,
            precision=config.train_of(ACTOR).precision,
            context_length=context_length,
            bundles=widths[ENGINES],
            run_dir=str(run_dir),
            weights=config.weights,
            lora=config.lora if adapters_apart(config) else None,
        )
        with problems.stage("environment"):
            engine_plan = plan_engines(config, engine, sending_by, engines, context, environment)
        resources.append(engine.spec.resources(config.engines[engine.name], engines))
    if problems:
        return None
    placement = arrange(
        groups,
        own_devices=own_devices,
        widths=widths,
        cpus=max(each.cpus for each in resources),
        gpus=max(each.gpus for each in resources),
        resources=config.cluster.resources,
    )
    return ProcessPlan(
        device=device,
        adapters_apart=adapters_apart(config),
        roles=plans,
        engine=engine_plan,
        sharing=offloaded(config, device),
        placement=placement,
        transport=transport,
        transport_options=to_plain(config.transports.get(sending_by.name, {})),
        senders=sending,
        common=common,
    )


def plan_engines(
    config: Config,
    engine: Loaded,
    transport: Loaded,
    cluster: ClusterInfo,
    context: EngineContext,
    environment: Callable[[str, Mapping[str, str]], dict[str, str]],
) -> EnginePlan:
    """Plan the replicas, which differ from `context` in their names and numbers. Raises ConfigError if the engine wants
    an environment that it cannot have."""
    options = config.engines[engine.name]
    assignments = (
        EngineAssignment(
            engine=config.rollout.engine,
            transport=transport.name,
            origins=origins_of((Kind.ENGINES, engine), (Kind.TRANSPORTS, transport)),
            model=config.model,
            options=to_plain(options),
            context=evolve(context, name=f"engine-{index}", index=index),
        )
        for index in range(config.rollout.replicas)
    )
    return EnginePlan(
        name=engine.name,
        assignments=tuple(assignments),
        environment=environment(engine.name, engine.spec.environment(options, cluster)),
        calls=engine.spec.calls(options, cluster),
    )


def check_extensions(config: Config, cluster: ClusterInfo, problems: Problems) -> None:
    names: dict[str, str] = {}  # extension -> its name in the config
    for index, each in enumerate(config.chosen_extensions):
        with problems.stage("extensions"):
            extension = load(Kind.EXTENSIONS, each.name)
            if names.setdefault(extension.name, each.name) != each.name:
                raise ConfigError(f"extensions: {each.name!r} and {names[extension.name]!r} share a name; keep one")
            check_spec(extension, each.options, cluster, config=config, table=f"extensions[{index}].options")


def require_form(config: Config, engine: Loaded, cluster: ClusterInfo) -> None:
    """Raise ConfigError if weights would be sent in another form than the engine, as configured, takes."""
    sent, taken = config.weights.quantize, engine.spec.quantized(config.engines[engine.name], cluster)
    if config.run.samples and sent != taken:
        raise ConfigError(
            f"weights.quantize: {sent!r}, but the engine {engine.name!r} is configured for {taken!r}; make them equal"
        )
    if config.run.samples and adapters_apart(config) and not engine.spec.adapters:
        raise ConfigError(
            f"weights.lora: 'adapter', but the engine {engine.name!r} cannot hold adapters beside its weights; set it "
            "to 'merged'"
        )


def adapters_apart(config: Config) -> bool:
    return config.lora is not None and config.weights.lora == "adapter"
