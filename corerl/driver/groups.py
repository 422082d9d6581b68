"""The groups of a run's processes: by which plan and where they run, and how all ranks of a run end and restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import define, evolve, field

from corerl.calls import wait_all
from corerl.cluster import nodes
from corerl.cluster.placement import Bundle, ResourcePool, Slot
from corerl.config.schema import ClusterConfig
from corerl.driver.progress import Progress, StopRequest
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.driver.run_dir import write_config
from corerl.engines.fleet import EngineFleet
from corerl.engines.service import EngineAssignment
from corerl.errors import ConfigError, InsufficientResources, WorkerDied
from corerl.messages import install_hint
from corerl.plan.plan import Plan
from corerl.plan.processes import ENGINES, EnginePlan, ProcessPlan, ranks_on
from corerl.plugin.hooks import ProcessFailure
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import transport_named
from corerl.weights.transport import Address


@define(kw_only=True, eq=False)
class RunGroups:
    """The ranks of a run's roles and its engines: their plan, and their places. Extensions on the driver get it as
    the `corerl.plugin.hooks.RunControl`; the extension `elastic` changes them."""

    plan: Plan  # of the groups as they are
    pool: ResourcePool
    roles: Mapping[str, Role]
    fleet: EngineFleet | None  # None if nothing is sampled
    residency: Residency
    progress: Progress
    stop: StopRequest
    # While extensions are asked between steps: completes a checkpoint of this step, from which ranks can restart.
    save: Callable[[], Path] | None = None
    changed: set[str] = field(factory=set)  # groups that extensions have changed between steps, or may have

    # ---- for extensions ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.progress.steps_done

    def notice(self, text: str) -> None:
        self.progress.notice(text)

    def request_stop(self) -> None:
        self.stop.requested = True

    # ---- for the run ------------------------------------------------------------------------------------------------

    def between_steps(self, save: Callable[[], Path]) -> set[str]:
        """Ask the extensions; returns the groups that have changed, or may have: engines may be new, or asleep. `save`
        completes a checkpoint of this step, from which ranks can restart."""
        self.changed, self.save = set(), save
        try:
            self.progress.observers.ask("between_steps", run=self)
        finally:
            self.save = None
        return self.changed

    def failed(self, message: str, *, ranks: bool) -> None:
        """Ask the extensions how to go on after all ranks, or engines alone, have ended. Raises InsufficientResources
        if a lost machine cannot be replaced, and WorkerDied if ranks have to end too."""
        self.pool.poll()
        if not ranks:
            self.require_ranks()
        failure = ProcessFailure(message=message, ranks=ranks, lost=self.lost)
        self.progress.observers.ask("ranks_failed", run=self, failure=failure)
        if lost := self.lost:
            counts = ", ".join(f"{count} of {name}" for name, count in lost.items())
            raise InsufficientResources(
                f"processes without a place: {counts}; to go on with spare machines, or in smaller groups: "
                f"{install_hint('elastic')}"
            )
        self.seat_engines()

    def update_address(self) -> Address:
        """The address of weight updates from these ranks to these engines, without a rendezvous."""
        assert self.fleet is not None
        placed = with_colocated_ranks(self.plan.processes, self.pool)  # where ranks and engines are now
        return update_address(placed, self.plan.cluster, self.fleet, self.plan.start.run_dir)

    # ---- ranks ------------------------------------------------------------------------------------------------------

    @property
    def elsewhere(self) -> bool:
        """Whether ranks that are trained have their places on other machines than this one."""
        trained = [name for name, role in self.roles.items() if role.loss is not None]
        return bool(nodes.elsewhere(slot.node for name in trained for slot in self.pool[name]))

    def end_ranks(self) -> None:
        """End all ranks, and let engines on their devices sleep, so that others find room to load."""
        for role in self.roles.values():
            role.group.processes.kill()
        self.residency.make_room()

    def start_ranks(self, checkpoint: Path | None) -> None:
        """Start the ranks of all roles by the plan, from a checkpoint or with the initial weights, where others have
        ended."""
        plans = self.plan.processes.roles
        starting = {}
        for name, role in self.roles.items():
            saved = "" if checkpoint is None or role.loss is None else str(checkpoint / name)
            starting[name] = role.group.restart(saved, plans[name], self.pool[name])
        wait_all(starting)
        for role in self.roles.values():
            role.next_optimizer_step = role.group.loaded_step
        self.residency.ranks_changed(self.roles)

    # ---- another plan -----------------------------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """Note that the groups are as this plan says, and write its config."""
        self.plan = plan
        try:
            write_config(plan.start.run_dir, plan.record)
        except ConfigError as error:  # the groups are changed already
            self.progress.notice(f"config.toml does not have the sizes of now: {error.message}")

    # ---- where processes have ended ---------------------------------------------------------------------------------

    @property
    def lost(self) -> dict[str, int]:
        """How many processes of each group were on a machine that is gone, for groups that lost any."""
        counts = {name: sum(slot.lost for slot in slots) for name, slots in self.pool.items()}
        return {name: count for name, count in counts.items() if count}

    def require_ranks(self) -> None:
        """While engines are replaced and ranks go on: raise WorkerDied if the machine of one is gone, once the ranks of
        its role are ended."""
        for name, role in self.roles.items():
            for rank, (slot, node) in enumerate(zip(self.pool[name], role.group.processes.nodes, strict=True)):
                if slot.lost or slot.node != node:
                    role.group.processes.kill()
                    raise WorkerDied(f"{name} rank {rank}: its machine is gone")

    def seat_engines(self) -> None:
        """Let engines that are about to be replaced start where their places are by now."""
        if self.fleet is not None and (engine := self.plan.processes.engine) is not None:
            slots = self.pool[ENGINES]
            self.fleet.reassign(with_devices(engine, slots), slots)


def with_colocated_ranks(after: ProcessPlan, slots: Mapping[str, Sequence[Slot]]) -> ProcessPlan:
    """The plan with the rank on each engine's device: engines that stayed may not be where a new run would place
    them. Raises ConfigError if an engine needs a rank on its device and has none."""
    if after.device == "cpu" or not after.colocated_ranks or ENGINES not in slots:
        return after
    numbers: dict[Bundle, int] = {}
    ranks, receivers = (
        [numbers.setdefault(bundle, len(numbers)) for slot in slots[name] for bundle in slot.bundles]
        for name in (ACTOR, ENGINES)
    )
    found = ranks_on(receivers, ranks, one_machine=False)
    if not found and transport_named(after.transport).one_device:
        raise ConfigError(
            f"weights.transport: {after.transport!r}, but engines that stay would be on devices without {ACTOR} ranks; "
            "choose other sizes"
        )
    return evolve(after, colocated_ranks=found)


def update_address(processes: ProcessPlan, cluster: ClusterConfig, fleet: EngineFleet, directory: Path) -> Address:
    """The address of weight updates from the actor's ranks to the engines, without a rendezvous; transports that write
    files do so in `directory`."""
    # Two processes on one GPU cannot share an NCCL group.
    own_devices = transport_named(processes.transport).one_device or cluster.placement == "disaggregated"
    return Address(
        transport=processes.transport,
        engines=fleet.receivers,
        path=str(directory / "weights"),
        colocated_ranks=processes.colocated_ranks,
        device=processes.device if own_devices else "cpu",
        # Less than the ranks' own: gathering ranks must not give up while the sender waits for an engine.
        timeout=cluster.timeout / 2,
        options=processes.transport_options,
    )


def with_devices(plan: EnginePlan, slots: Sequence[Slot]) -> list[EngineAssignment]:
    """The engines' assignments, with the devices of their slots."""
    return [
        evolve(assignment, context=evolve(assignment.context, devices=slot.devices))
        for assignment, slot in zip(plan.assignments, slots, strict=True)
    ]
