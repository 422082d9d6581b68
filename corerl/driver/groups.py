"""The groups of a run's processes, by which plan and where they run; another plan takes effect between two steps, or
where ranks or engines have ended and are about to restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import Factory, define, evolve, field

from corerl.calls import wait_all
from corerl.cluster import nodes
from corerl.cluster.placement import Bundle, ResourcePool, Slot
from corerl.config.schema import ClusterConfig
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.driver.run_dir import write_config
from corerl.driver.stop import StopRequest
from corerl.engines.fleet import EngineFleet
from corerl.engines.service import EngineAssignment
from corerl.errors import ConfigError, CorerlError, InsufficientResources, ResizeFailed, UserError, WorkerDied
from corerl.plan.plan import Plan
from corerl.plan.processes import ENGINES, EnginePlan, ProcessPlan, senders_on
from corerl.plan.residency import REST
from corerl.plan.roles import RolePlan
from corerl.plan.settle import REPLICAS
from corerl.plugin.hooks import ProcessFailure
from corerl.plugin.registry import INSTALL_HINTS, Kind
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import transport_named
from corerl.weights.transport import Address


@define(kw_only=True, eq=False)
class Groups:
    """The ranks of a run's roles and its engines: their plan, and their places. To the extensions that may change them
    it is the `corerl.plugin.hooks.RunControl`."""

    plan: Plan  # of the groups as they are
    pool: ResourcePool
    roles: Mapping[str, Role]
    fleet: EngineFleet | None  # None if nothing is sampled
    residency: Residency
    progress: Progress
    stop: StopRequest
    # The plan's processes, with the senders of weights where engines are now.
    _placed: ProcessPlan = field(default=Factory(lambda self: self.plan.processes, takes_self=True))
    _changed: set[str] = field(factory=set)  # roles that were restarted by `_change`, and "engines" if it called them
    _save: Callable[[], Path] | None = None  # while extensions are asked between steps
    _failure: ProcessFailure | None = None  # while extensions are asked about it

    # ---- for extensions ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.progress.steps_done

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks by role, and replicas, under the names of their settings."""
        processes = self.plan.processes
        sizes = {f"roles.{name}.ranks": len(role.assignments) for name, role in processes.roles.items()}
        if processes.engine is not None:
            sizes[REPLICAS] = len(processes.engine.assignments)
        return sizes

    def replan(self, overrides: Sequence[str]) -> Plan:
        return self.plan.resized(overrides)

    def apply(self, plan: Plan) -> list[str]:
        if self._failure is not None:
            lines = self._start_by(plan, staying=[] if self._failure.ranks else [*self.roles])
        else:
            assert self._save is not None
            lines = self._change(plan, self._save)
        for line in lines:
            self.notice(line)
        return lines

    def notice(self, text: str) -> None:
        self.progress.notice(text)

    def request_stop(self) -> None:
        self.stop.requested = True

    # ---- for the run ------------------------------------------------------------------------------------------------

    def between_steps(self, save: Callable[[], Path]) -> set[str]:
        """Ask the extensions; returns the groups that have changed, or may have: engines may be new, or asleep. `save`
        completes a checkpoint of this step, from which ranks can restart."""
        self._changed, self._save = set(), save
        try:
            self.progress.observers.ask("between_steps", run=self)
        finally:
            self._save = None
        return self._changed

    def failed(self, message: str, *, ranks: bool) -> None:
        """Ask the extensions how to go on after all ranks, or engines alone, have ended. Raises InsufficientResources
        if a lost machine cannot be replaced, and WorkerDied if ranks have to end too."""
        self.pool.poll()
        if not ranks:
            self.require_ranks()
        self._failure = ProcessFailure(message=message, ranks=ranks, lost=self.lost)
        try:
            self.progress.observers.ask("ranks_failed", run=self, failure=self._failure)
        finally:
            self._failure = None
        if lost := self.lost:
            counts = ", ".join(f"{count} of {name}" for name, count in lost.items())
            raise InsufficientResources(
                f"processes without a place: {counts}; to go on with spare machines, or in smaller groups: "
                f"{INSTALL_HINTS[Kind.EXTENSIONS]['elastic']}"
            )
        self._seat_engines()

    def update_address(self) -> Address:
        """The address of weight updates from these ranks to these engines, without a rendezvous."""
        assert self.fleet is not None
        return update_address(self._placed, self.plan.cluster, self.fleet, self.plan.start.run_dir)

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

    def start_ranks(self, checkpoint: Path | None) -> int:
        """Start the ranks of all roles by the plan, from a checkpoint or with the initial weights, where others have
        ended. Returns the version of the actor's weights."""
        plans = self.plan.processes.roles
        starting = {}
        for name, role in self.roles.items():
            saved = "" if checkpoint is None or role.loss is None else str(checkpoint / name)
            starting[name] = role.group.restart(saved, plans[name], self.pool[name])
        started = wait_all(starting)
        for name, init in started.items():
            self.roles[name].next_optimizer_step = init.optimizer_step
        self.residency.ranks_changed(self.roles)
        return started[ACTOR].weights_version

    # ---- between two steps ------------------------------------------------------------------------------------------

    def _change(self, plan: Plan, save: Callable[[], Path]) -> list[str]:
        """Let ranks and engines be as the plan says; returns a line for each group that has changed. If ranks change,
        all roles restart from the checkpoint of this step, which `save` completes.

        Raises UserError or ResizeFailed if not all groups could be changed, once they are as before."""
        require_same_surroundings(self.plan.processes, plan.processes)
        before, places, began = self.plan, dict(self.pool), time.monotonic()
        restarts = any(_differ(role, plan.processes.roles[name]) for name, role in before.processes.roles.items())
        replicas = _replicas(before.processes), _replicas(plan.processes)
        if not restarts and replicas[0] == replicas[1]:
            return []
        staying = {} if restarts else {name: len(self.pool[name]) for name in self.roles}
        if replicas[1]:
            staying[ENGINES] = min(replicas)
        try:
            slots = self._arranged(plan.processes, staying)
            _with_senders(plan.processes, slots)
            checkpoint = save() if restarts else None
            try:
                self._become(plan, slots, checkpoint)
            except CorerlError as error:
                self._become(before, places, checkpoint)
                if isinstance(error, UserError | ResizeFailed):
                    raise
                raise ResizeFailed(f"{error.message}; all groups are as before") from error
        finally:
            self.pool.take({})  # gives back what was reserved for processes that have ended, or did not come
        self._write_config()
        seconds = time.monotonic() - began
        return [f"{line}, {seconds:.1f} s" for line in _changes(before.processes, plan.processes)]

    def _become(self, plan: Plan, slots: Mapping[str, Sequence[Slot]], checkpoint: Path | None) -> None:
        """Engines that are too many end first and missing ones start last: so devices can pass from one side to the
        other. In between all ranks restart from the checkpoint, if there is one."""
        with self.progress.phase("resize"):
            self._resize_engines(plan, slots, smaller=True)
            if checkpoint is not None:
                self._changed |= self.roles.keys()
                for role in self.roles.values():
                    if not role.group.processes.ended:
                        role.group.shutdown("resized")
                self.end_ranks()
                self.pool.take({name: slots[name] for name in self.roles}, give_back=False)
                self.plan = plan
                self.start_ranks(checkpoint)
            self._resize_engines(plan, slots, smaller=False)
        self.plan, self._placed = plan, _with_senders(plan.processes, slots)

    def _resize_engines(self, plan: Plan, slots: Mapping[str, Sequence[Slot]], *, smaller: bool) -> None:
        engine = plan.processes.engine
        if self.fleet is None or engine is None:
            return
        now, wanted = len(self.fleet), len(engine.assignments)
        if wanted == now or (wanted < now) is not smaller:
            return
        self._changed.add(ENGINES)
        if not smaller:
            self.residency.enter(REST)  # new engines load where ranks may be
        self.fleet.resize(with_devices(engine, slots[ENGINES]), slots[ENGINES])
        self.pool.take({ENGINES: slots[ENGINES]}, give_back=False)
        self.residency.engines_changed()

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

    def _start_by(self, plan: Plan, *, staying: Sequence[str]) -> list[str]:
        """Let what is about to start do so by this plan, on the devices that are left; roles that are `staying` go on.
        Returns a line for each group whose size has changed. Raises CorerlError if there is no place for one."""
        before, after = self.plan.processes, plan.processes
        require_same_surroundings(before, after)
        engines = [ENGINES] if self.fleet is not None else []
        found = self.pool.replace_lost(after.placement, [*staying, *engines])
        placed = _with_senders(after, found)
        self.pool.take(found)
        self.plan, self._placed = plan, placed
        self._write_config()
        self._seat_engines()
        return [*_changes(before, after)]

    def _seat_engines(self) -> None:
        """Let engines that are about to be replaced start where their places are by now."""
        if self.fleet is not None and (engine := self.plan.processes.engine) is not None:
            slots = self.pool[ENGINES]
            self.fleet.reassign(with_devices(engine, slots), slots)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _write_config(self) -> None:
        """Write the plan's config. A notice says if that is not possible: the groups are changed already."""
        try:
            write_config(self.plan.start.run_dir, self.plan.record)
        except ConfigError as error:
            self.progress.notice(f"config.toml does not have the sizes of now: {error.message}")

    def _arranged(self, after: ProcessPlan, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        try:
            return self.pool.arrange(after.placement, staying)
        except CorerlError as error:  # no room, a machine that does not fit, or a GPU that does not answer
            raise ResizeFailed(error.message) from error


def _with_senders(after: ProcessPlan, slots: Mapping[str, Sequence[Slot]]) -> ProcessPlan:
    """The plan with the sender on each engine's device: engines that stayed may not be where a new run would place
    them. Raises ConfigError if an engine needs a sender on its device and has none."""
    if after.device == "cpu" or not after.senders or ENGINES not in slots:
        return after
    numbers: dict[Bundle, int] = {}
    ranks, receivers = (
        [numbers.setdefault(bundle, len(numbers)) for slot in slots[name] for bundle in slot.bundles]
        for name in (ACTOR, ENGINES)
    )
    found = senders_on(receivers, ranks, one_machine=False)
    if not found and transport_named(after.transport).one_device:
        raise ConfigError(
            f"weights.transport: {after.transport!r}, but engines that stay would be on devices without {ACTOR} ranks; "
            "choose other sizes"
        )
    return evolve(after, senders=found)


def update_address(processes: ProcessPlan, cluster: ClusterConfig, fleet: EngineFleet, directory: Path) -> Address:
    """The address of weight updates from the actor's ranks to the engines, without a rendezvous; transports that write
    files do so in `directory`."""
    # Two processes on one GPU cannot share an NCCL group.
    own_devices = transport_named(processes.transport).one_device or cluster.placement == "disaggregated"
    return Address(
        transport=processes.transport,
        engines=fleet.receivers,
        path=str(directory / "weights"),
        senders=processes.senders,
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


def _replicas(plan: ProcessPlan) -> int:
    return 0 if plan.engine is None else len(plan.engine.assignments)


def _changes(before: ProcessPlan, after: ProcessPlan) -> Iterator[str]:
    """A line for each group that is another after a change."""
    for name, role in before.roles.items():
        if _differ(role, after.roles[name]):
            yield f"{name}: {_shape(role)} -> {_shape(after.roles[name])}"
    if _replicas(before) != _replicas(after):
        yield f"engines: {_replicas(before)} -> {_replicas(after)}"


def _differ(before: RolePlan, after: RolePlan) -> bool:
    """Whether two plans differ in more than the checkpoint to start from."""

    def seen(plan: RolePlan) -> object:
        assignments = [evolve(each, config=evolve(each.config, resume="")) for each in plan.assignments]
        return assignments, dict(plan.environment), plan.resources

    return seen(before) != seen(after)


def require_same_surroundings(before: ProcessPlan, after: ProcessPlan) -> None:
    """Raise ConfigError if more than sizes would have to change."""
    if (before.transport, dict(before.common)) != (after.transport, dict(after.common)):
        raise ConfigError(
            f"weights.transport: {before.transport!r} while the run goes on, but these sizes need "
            f"{after.transport!r}; set weights.transport='{after.transport}' from the start, or choose other sizes"
        )


def _shape(plan: RolePlan) -> str:
    ranks = len(plan.assignments)
    return f"{ranks} rank{'s' * (ranks > 1)} of {plan.backend.name} (dp {plan.data_parallel})"
