"""Turn a run's config into each rank's assignment, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import evolve, field, frozen

from corerl.algorithms.base import Objective
from corerl.checkpoint.reader import written_ranks
from corerl.config.load import to_plain
from corerl.config.problems import Problems
from corerl.config.schema import ClusterInfo, Config, LayoutName, RoleConfig, TrainConfig
from corerl.plan.assignment import Assignment
from corerl.plan.resolve import backend_name, check_spec, has_value_head, is_frozen, role_options
from corerl.plugin.capabilities import Capability, asked_by_role
from corerl.plugin.check import check_capabilities
from corerl.plugin.context import Context
from corerl.plugin.fingerprint import origins_of
from corerl.plugin.observers import extensions_for
from corerl.plugin.registry import Kind, Loaded, load
from corerl.plugin.spec import ACTOR, Process, Resources
from corerl.plugin.transports import AUTO, transport_named
from corerl.types import LossSpec

CLIPPED = Objective(loss=LossSpec(name="clipped"), aggregation="token-mean")


@frozen(kw_only=True)
class RolePlan:
    """Everything needed to launch a role."""

    role: str
    backend: Loaded
    assignments: tuple[Assignment, ...]  # one per rank
    data_parallel: int  # number of data-parallel groups, according to the backend's spec
    cluster: ClusterInfo = field(repr=False)  # what the spec was told
    environment: Mapping[str, str] = field(repr=False)  # of its processes, before they import anything
    resources: Resources  # per rank
    objective: Objective | None = CLIPPED  # as the run's algorithm says; None for a frozen role
    max_tokens: int  # of a response, for objectives that divide by it

    @property
    def train(self) -> TrainConfig:
        """The training settings that the ranks get."""
        return self.assignments[0].config.train


def plan_role(
    role: str,
    config: Config,
    *,
    experts: int,
    device: str,
    run_dir: str,
    resume: str,
    buffer: str = "",
    model: Mapping[str, Any] | None = None,
    layout: LayoutName | None = None,
    snapshots: Mapping[str, str] = MappingProxyType({}),
) -> RolePlan:
    """Check a role and plan its launch, with the environment that its backend asks for. `config` is resolved: options
    are instances of the plugins' classes. `experts` is the model's number of experts, `buffer` the name of a buffer
    with weights, if it has any, `resume` the role's directory in a checkpoint ("" for a fresh start), `model` the
    fields of its Hugging Face config, for the backend's checks, `layout` what `train.layout` comes to for this model
    (None if that is not known), `snapshots` the earlier weights that will be passed through, each with the setting that
    wants it.

    Raises all problems of the role together: unknown backend, missing capabilities, the backend's own checks.
    """
    choice = config.chosen_roles[role]
    name = backend_name(config, role)
    backend = load(Kind.BACKENDS, name)
    options = role_options(config, role, backend)
    half = backend.spec.support(Capability.BFLOAT16).full
    cluster = cluster_of(role, config, device=device, model=model, layout=layout, bfloat16=half)
    resume = "" if cluster.frozen else resume  # its weights are in no checkpoint
    problems = Problems()
    with problems.stage("capabilities"):
        saved_ranks = written_ranks(Path(resume)) if resume else 0
        needs = needed(
            role, config, cluster, experts=experts, buffer=buffer, saved_ranks=saved_ranks, snapshots=snapshots
        )
        check_capabilities(backend.spec, needs, name=name)
    with problems.stage("backends"):
        check_spec(backend, options, cluster, config=config, role=role)
    problems.raise_all()
    extensions = extensions_for(config.chosen_extensions, Process.WORKER)
    plugins = [(Kind.BACKENDS, backend), *[(Kind.EXTENSIONS, loaded) for _, loaded in extensions]]
    transport = config.weights.transport if role == ACTOR and config.weights.transport != AUTO else ""
    if transport:
        plugins.append((Kind.TRANSPORTS, load(Kind.TRANSPORTS, transport)))
    role_config = RoleConfig(
        model=config.model_of(role),
        train=cluster.train or config.train_of(role),
        options=to_plain(options),
        weights=config.weights,
        device=device,
        seed=config.run.seed,
        timeout=config.cluster.timeout,
        value_head=has_value_head(config, role),
        lora=cluster.lora,
        frozen=cluster.frozen,
        resume=resume,
        sleeps=config.cluster.offload_kinds if role in offloaded(config, device) else (),
    )
    assignment = Assignment(
        context=Context(role=role, rank=0, world_size=choice.ranks, local_rank=0, run_dir=run_dir),
        backend=name,
        config=role_config,
        extensions=tuple(evolve(choice, options=to_plain(choice.options)) for choice, _ in extensions),
        transport=transport,
        origins=origins_of(*plugins),
    )
    return RolePlan(
        role=role,
        backend=backend,
        assignments=tuple(
            evolve(assignment, context=evolve(assignment.context, rank=rank)) for rank in range(choice.ranks)
        ),
        data_parallel=backend.spec.data_parallel(options, cluster),
        cluster=cluster,
        environment=dict(backend.spec.environment(options, cluster)),
        resources=backend.spec.resources(options, cluster),
        max_tokens=config.rollout.max_tokens,
    )


def cluster_of(
    role: str,
    config: Config,
    *,
    device: str,
    model: Mapping[str, Any] | None = None,
    layout: LayoutName | None = None,
    bfloat16: bool = True,
) -> ClusterInfo:
    """What the role's backend spec may know about the run. A given `layout` replaces its `train.layout`, and what its
    [train] leaves open is settled, for a backend with or without bfloat16."""
    ranks, train = config.chosen_roles[role].ranks, config.train_of(role).settled(device, bfloat16=bfloat16)
    frozen = is_frozen(config, role)
    if frozen:  # nothing is kept for a backward pass
        train = evolve(train, recompute="none")
    return ClusterInfo(
        device=device,
        ranks=ranks,
        model=model or {},
        train=evolve(train, layout=layout) if layout else train,
        frozen=frozen,
        lora=config.lora_of(role),
        streamed=role == ACTOR and config.rollout.source == "streamed",
        elsewhere=bool(config.cluster.address),
    )


def needed(
    role: str,
    config: Config,
    cluster: ClusterInfo,
    *,
    experts: int = 1,
    buffer: str = "",
    saved_ranks: int = 0,
    snapshots: Mapping[str, str] = MappingProxyType({}),
) -> dict[Capability, str]:
    """The backend capabilities that the run will use, each with the setting that requires it. `saved_ranks` is the
    number of ranks that wrote the role's checkpoint; 0 for a fresh start."""
    asked, value_head = config.train_of(role), has_value_head(config, role)
    train = evolve(cluster.train or asked, layout=asked.layout)
    needs = asked_by_role(
        role,
        train,
        device=cluster.device,
        ranks=cluster.ranks,
        value_head=value_head,
        frozen=cluster.frozen,
        lora=config.lora_table_of(role) if cluster.lora else "",
    )
    if cluster.train is not None and cluster.train.layout == "whole":
        needs.setdefault(Capability.WHOLE, "a model that cannot be packed")
    if experts > 1:
        needs[Capability.MOE] = f"a model with {experts} experts"
    if buffer:
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
    if role == ACTOR and (transport := config.weights.transport) != AUTO:
        needs[transport_named(transport).capability] = f"weights.transport = '{transport}'"
    return needs


def offloaded(config: Config, device: str) -> tuple[str, ...]:
    """The roles that share devices with engines and take turns with them in device memory."""
    offload = config.cluster.offload
    apart = config.cluster.placement != "colocated" or not config.run.samples
    if apart or offload == "never" or (offload == "auto" and device != "cuda"):
        return ()
    return tuple(role for role in config.chosen_roles if role not in config.own_devices)
