"""Turn a run's config into each rank's assignment, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from corerl.algorithms.base import Objective
from corerl.checkpoint.reader import written_ranks
from corerl.config.schema import ClusterInfo, Config, ExtensionChoice, RoleConfig, TrainConfig
from corerl.config.toml_text import to_plain
from corerl.kinds import MemoryKind, experts_of
from corerl.plan.check import Problems
from corerl.plan.environment import environment_of
from corerl.plan.residency import offloaded
from corerl.plan.resolve import Plugins, backend_name, check_spec, role_options
from corerl.plugin.capabilities import Capability, asked_by_role, check_capabilities
from corerl.plugin.hooks import Context
from corerl.plugin.origins import Origin, origins_of
from corerl.plugin.registry import Kind, Loaded
from corerl.plugin.spec import ACTOR, Process
from corerl.types import LossSpec

if TYPE_CHECKING:
    from corerl.plan.algorithm import AlgorithmPlan
    from corerl.plan.models import RoleModel

CLIPPED = Objective(loss=LossSpec(name="clipped"), aggregation="token-mean")


@frozen(kw_only=True)
class Assignment:
    """The message from the driver to a rank, as plain data, so that it unpickles even if a plugin is missing."""

    context: Context
    backend: str  # the name, resolved again in the worker
    config: RoleConfig  # with `options` as a plain table
    extensions: tuple[ExtensionChoice, ...] = ()  # the ones for workers, options as plain tables
    transport: str = ""  # of the weight updates that it sends; empty if it sends none, or it is not known
    origins: tuple[Origin, ...]  # of the plugins the driver resolved


@frozen(kw_only=True)
class RolePlan:
    """Everything needed to launch a role."""

    role: str
    backend: Loaded
    assignments: tuple[Assignment, ...]  # one per rank
    data_parallel: int  # number of data-parallel groups, according to the backend's spec
    cluster: ClusterInfo = field(repr=False)  # what the spec's check was given
    environment: Mapping[str, str] = field(repr=False)  # of its processes, before they import anything
    objective: Objective | None = CLIPPED  # as the run's algorithm says; None for a frozen role
    max_tokens: int  # of a response, for objectives that divide by it

    @property
    def vocabulary(self) -> int:
        """How many token ids log-probs are over."""
        text = self.cluster.model.get("text_config") or self.cluster.model
        return self.assignments[0].config.model.vocabulary or int(text["vocab_size"])

    @property
    def train(self) -> TrainConfig:
        """The training settings that the ranks get."""
        return self.assignments[0].config.train


def plan_role(
    role: str,
    config: Config,
    plugins: Plugins,
    *,
    device: str,
    run_dir: str = "",
    resume: str = "",
    model: RoleModel | None = None,
    algorithm: AlgorithmPlan | None = None,
    common: Mapping[str, str] = MappingProxyType({}),
) -> RolePlan:
    """Check a role and plan its launch. `config` is resolved: options are instances of the plugins' classes. `resume`
    is the role's directory in a checkpoint ("" for a fresh start), `model` the role's (None if that is not known: then
    nothing of it is checked), `common` the environment of all processes.

    Raises all problems of the role together: missing capabilities, those of the backend's own checks, and an
    environment that it cannot have.
    """
    choice, backend = config.chosen_roles[role], plugins.backends[role]
    options = role_options(config, role, backend)
    cluster = cluster_of(role, config, plugins, device=device, model=model)
    resume = "" if cluster.frozen else resume  # its weights are in no checkpoint
    snapshots = algorithm.snapshots(role) if algorithm is not None and config.run.trains else {}
    problems = Problems()
    with problems.stage():
        saved_ranks = written_ranks(Path(resume)) if resume else 0
        needs = needed(role, config, plugins, cluster, model=model, saved_ranks=saved_ranks, snapshots=snapshots)
        check_capabilities(backend.spec, needs, name=backend_name(config, role))
    with problems.stage():
        check_spec(backend, options, cluster, config=config, role=role)
    problems.raise_all()
    assignment = _assignment(role, config, plugins, cluster, run_dir=run_dir, resume=resume)
    environment = backend.spec.environment(options, cluster)
    return RolePlan(
        role=role,
        backend=backend,
        assignments=tuple(
            evolve(assignment, context=evolve(assignment.context, rank=rank)) for rank in range(choice.ranks)
        ),
        data_parallel=backend.spec.data_parallel(options, cluster),
        cluster=cluster,
        environment=environment_of(backend.name, environment, cluster=config.cluster, common=common),
        objective=CLIPPED if algorithm is None else algorithm.objectives.get(role),
        max_tokens=config.rollout.max_tokens,
    )


def _assignment(
    role: str, config: Config, plugins: Plugins, cluster: ClusterInfo, *, run_dir: str, resume: str
) -> Assignment:
    """That of rank 0."""
    choice, backend = config.chosen_roles[role], plugins.backends[role]
    pairs = zip(config.chosen_extensions, plugins.extensions, strict=True)
    extensions = [(own, loaded) for own, loaded in pairs if loaded.spec.process is Process.WORKER]
    origins = [(Kind.BACKENDS, backend), *((Kind.EXTENSIONS, loaded) for _, loaded in extensions)]
    transport = plugins.transport if role == ACTOR else None
    if transport is not None:
        origins.append((Kind.TRANSPORTS, transport))
    if plugins.pictures is not None:
        origins.append((Kind.PICTURES, plugins.pictures))
    return Assignment(
        context=Context(role=role, rank=0, world_size=choice.ranks, local_rank=0, run_dir=run_dir),
        backend=backend_name(config, role),
        config=RoleConfig(
            model=config.model_of(role),
            train=cluster.train or config.train_of(role),
            options=to_plain(role_options(config, role, backend)),
            weights=config.weights,
            device=cluster.device,
            seed=config.run.seed,
            timeout=config.cluster.timeout,
            value_head=plugins.is_critic(role),
            lora=cluster.lora,
            frozen=cluster.frozen,
            resume=resume,
            sleeps=tuple(MemoryKind) if role in offloaded(config, cluster.device) else (),
        ),
        extensions=tuple(evolve(own, options=to_plain(own.options)) for own, _ in extensions),
        transport=config.weights.transport if transport is not None else "",
        origins=origins_of(*origins),
    )


def cluster_of(
    role: str, config: Config, plugins: Plugins, *, device: str, model: RoleModel | None = None
) -> ClusterInfo:
    """What the role's backend spec may know about the run, with nothing in its [train] left open. A built `model`
    decides on `train.layout`."""
    train = config.train_of(role).settled(device, bfloat16=plugins.supports(role, Capability.BFLOAT16))
    frozen = plugins.is_frozen(role)
    if frozen:  # nothing is kept for a backward pass
        train = evolve(train, recompute="none")
    if model is not None:
        train = evolve(train, layout=model.layout.name)
    return ClusterInfo(
        device=device,
        ranks=config.chosen_roles[role].ranks,
        model=model.hf.to_dict() if model is not None else {},
        train=train,
        frozen=frozen,
        lora=config.lora_of(role),
        streamed=role == ACTOR and config.rollout.source == "streamed",
        elsewhere=bool(config.cluster.address),
    )


def needed(
    role: str,
    config: Config,
    plugins: Plugins,
    cluster: ClusterInfo,
    *,
    model: RoleModel | None = None,
    saved_ranks: int = 0,
    snapshots: Mapping[str, str] = MappingProxyType({}),
) -> dict[Capability, str]:
    """The backend capabilities that the run will use, each with the setting that requires it. `saved_ranks` is the
    number of ranks that wrote the role's checkpoint; 0 for a fresh start."""
    asked = config.train_of(role)
    needs = asked_by_role(
        role,
        evolve(cluster.train or asked, layout=asked.layout),
        device=cluster.device,
        ranks=cluster.ranks,
        value_head=plugins.is_critic(role),
        frozen=cluster.frozen,
        lora=cluster.lora,
        lora_table=config.lora_table_of(role),
        pictures=config.model.pictures,
    )
    if cluster.train is not None and cluster.train.layout == "whole":
        needs.setdefault(Capability.WHOLE, "a model that cannot be packed")
    if model is not None:
        from corerl.models.build import stored_buffers  # a worker imports this module, and does not need it

        if (count := experts_of(model.hf.to_dict())) > 1:
            needs[Capability.MOE] = f"a model with {count} experts"
        if buffer := next(iter(stored_buffers(model.built)), ""):
            needs[Capability.BUFFERS] = f"a model with weights in buffers ({buffer})"
    if role == ACTOR and config.algorithm.routing_replay != "none" and config.run.trains:
        needs[Capability.ROUTING_REPLAY] = f"algorithm.routing_replay = '{config.algorithm.routing_replay}'"
    if saved_ranks and saved_ranks != cluster.ranks:
        needs[Capability.RESHARD] = (
            f"resuming a checkpoint of {saved_ranks} ranks with roles.{role}.ranks = {cluster.ranks}"
        )
    for asked_by in snapshots.values():
        needs[Capability.SNAPSHOTS] = asked_by
    if role in offloaded(config, cluster.device):
        needs[Capability.SLEEP] = f"cluster.offload = '{config.cluster.offload}' with colocated engines"
    if (config.checkpoint.background or config.checkpoint.memory) and config.run.trains and not cluster.frozen:
        name = "background" if config.checkpoint.background else "memory"
        needs[Capability.SAVE_BACKGROUND] = f"checkpoint.{name} = true"
    if role == ACTOR and plugins.transport is not None:
        needs[plugins.transport.spec.capability] = f"weights.transport = '{config.weights.transport}'"
    return needs
