"""The groups of a run's processes, by which plan and where they run; another plan takes effect between two steps, or
where ranks or engines have ended and are about to start again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import define, evolve

from corerl.cluster.placement import Bundle, ResourcePool, Slot
from corerl.driver.checkpoints import Checkpoints
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.driver.run_dir import write_config
from corerl.driver.updates import WeightUpdates
from corerl.engines.service import EngineAssignment
from corerl.errors import ConfigError, CorerlError, ResizeFailed, SaveFailed, UserError, WorkerDied
from corerl.plan.plan import Plan
from corerl.plan.processes import ENGINES, EnginePlan, ProcessPlan, senders
from corerl.plan.residency import REST, training
from corerl.plan.roles import RolePlan
from corerl.plan.settle import REPLICAS
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import transport_named
from corerl.weights.transport import Address


@define(kw_only=True, eq=False)
class Groups:
    """The ranks of a run's roles and its engines: their plan, and their places."""

    plan: Plan  # of the groups as they are
    room: ResourcePool
    roles: Mapping[str, Role]
    updates: WeightUpdates | None
    saves: Sequence[Checkpoints]
    residency: Residency
    progress: Progress
    address_of: Callable[[ProcessPlan, Sequence[str]], Address]  # of updates to these receivers

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks by role, and replicas, under the names of their settings."""
        processes = self.plan.processes
        sizes = {f"roles.{name}.ranks": len(role.assignments) for name, role in processes.roles.items()}
        if processes.engine is not None:
            sizes[REPLICAS] = len(processes.engine.assignments)
        return sizes

    # ---- between two steps ------------------------------------------------------------------------------------------

    def change(self, plan: Plan) -> Iterator[str]:
        """Let ranks and engines be as the plan says; yields a line for each group that has changed. Ranks are replaced
        by others that go on with their state.

        Raises UserError or ResizeFailed for the first group that could not be changed, which then is as before;
        WorkerDied if ranks die."""
        require_same_surroundings(self.plan.processes, plan.processes)
        before, after = self.plan.processes, plan.processes
        moved = [name for name in self.roles if _others(before.roles[name], after.roles[name])]
        replicas = len(_engines(before)), len(_engines(after))
        if not moved and replicas[0] == replicas[1]:
            return
        staying = {name: len(role.assignments) for name, role in before.roles.items() if name not in moved}
        if replicas[1]:
            staying[ENGINES] = min(replicas)
        try:
            slots = self._arranged(after, staying)
            renew = functools.partial(self.address_of, _seen(after, slots))
            self._complete_saves()
            yield from self._move(moved, after, slots, renew)
            if replicas[0] != replicas[1] and self.updates is not None and after.engine is not None:
                began = time.monotonic()
                self.residency.enter(REST)  # new engines load where others may be
                with self.progress.phase("resize"):
                    self.updates.fleet.resize(with_devices(after.engine, slots[ENGINES]), slots[ENGINES])
                self.room.take({ENGINES: slots[ENGINES]}, give_back=False)
                self.plan = evolve(self.plan, processes=evolve(self.plan.processes, engine=after.engine))
                self.residency.engines_changed()
                self.updates.resized(renew)
                yield f"engines: {replicas[0]} -> {replicas[1]}, {_since(began)}"
        finally:
            self.room.take({})  # gives back what was reserved for processes that have ended, or did not come
        self.plan = plan
        write_config(plan.start.run_dir, plan.record)

    def _move(
        self,
        moved: Sequence[str],
        after: ProcessPlan,
        slots: Mapping[str, Sequence[Slot]],
        renew: Callable[[Sequence[str]], Address],
    ) -> list[str]:
        """Move these roles' ranks. Of several, those that have moved go back if another cannot: one setting is of all.
        Returns a line for each."""
        before, lines = self.plan.processes, list[str]()
        had = {name: self.room[name] for name in (*self.roles, *([ENGINES] if before.engine is not None else ()))}
        for name in moved:
            began = time.monotonic()
            try:
                self._move_one(name, after.roles[name], slots[name], renew)
            except (ResizeFailed, UserError) as error:
                back = functools.partial(self.address_of, _seen(before, had))
                for other in reversed(moved[: len(lines)]):
                    try:
                        self._move_one(other, before.roles[other], had[other], back)
                    except (ResizeFailed, UserError) as stuck:
                        told = f"{error.message}; the {other}, which had moved, cannot go back: {stuck.message}"
                        raise ResizeFailed(told) from error
                raise
            lines.append(f"{name}: {_shape(before.roles[name])} -> {_shape(after.roles[name])}, {_since(began)}")
        return lines

    def _move_one(
        self, name: str, plan: RolePlan, slots: Sequence[Slot], renew: Callable[[Sequence[str]], Address]
    ) -> None:
        role = self.roles[name]
        self.residency.take_turns()
        self.residency.enter(_room_for(self.residency, role))
        with self.progress.phase("resize"):
            role.group.move(plan, slots, role.step(self.progress.step))
        self.residency.ranks_changed([name])
        self.room.take({name: slots}, give_back=False)
        roles = {**self.plan.processes.roles, name: plan}
        self.plan = evolve(self.plan, processes=evolve(self.plan.processes, roles=roles))
        if self.updates is not None and name == ACTOR:
            self.updates.resized(renew)

    # ---- where processes have ended ---------------------------------------------------------------------------------

    @property
    def lost(self) -> dict[str, int]:
        """How many of each group's processes were on a machine that is gone, without groups of which none was."""
        counts = {name: sum(slot.lost for slot in slots) for name, slots in self.room.items()}
        return {name: count for name, count in counts.items() if count}

    def require_ranks(self) -> None:
        """While engines are replaced and ranks go on: raise WorkerDied if the machine of one is gone, once the ranks of
        its role are ended."""
        for name, role in self.roles.items():
            for rank, (slot, node) in enumerate(zip(self.room[name], role.group.processes.nodes, strict=True)):
                if slot.lost or slot.node != node:
                    role.group.processes.kill()
                    raise WorkerDied(f"{name} rank {rank}: its machine is gone")

    def start_by(self, plan: Plan, *, staying: Sequence[str]) -> list[str]:
        """Let what is about to start do so by this plan, on the devices that are left; roles that are `staying` go on.
        Returns a line for each group whose size has changed. Raises CorerlError if there is no place for one."""
        before, after = self.plan.processes, plan.processes
        require_same_surroundings(before, after)
        engines = [ENGINES] if self.updates is not None else []
        found = self.room.replace_lost(after.placement, [*staying, *engines])
        seen = _seen(after, found)
        self.room.take(found)
        self.plan = plan
        write_config(plan.start.run_dir, plan.record)
        self.seat_engines()
        if self.updates is not None:  # an engine may be beside another rank now, also where it is one of as many
            self.updates.meets_at(functools.partial(self.address_of, seen))
        lines = [
            f"{name}: {_shape(role)} -> {_shape(after.roles[name])}"
            for name, role in before.roles.items()
            if len(role.assignments) != len(after.roles[name].assignments)
        ]
        if len(_engines(before)) != len(_engines(after)):
            lines.append(f"engines: {len(_engines(before))} -> {len(_engines(after))}")
        return lines

    def seat_engines(self) -> None:
        """Let engines that are about to be replaced start where their places are by now."""
        if self.updates is not None and (engine := self.plan.processes.engine) is not None:
            slots = self.room[ENGINES]
            self.updates.fleet.reassign(with_devices(engine, slots), slots)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _arranged(self, after: ProcessPlan, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
        try:
            return self.room.arrange(after.placement, staying)
        except CorerlError as error:  # no room, a machine that does not fit, or a GPU that does not answer
            raise ResizeFailed(error.message) from error

    def _complete_saves(self) -> None:
        """Complete those in flight, which the ranks' successors know nothing of."""
        for save in self.saves:
            try:
                save.complete(wait=True)
            except SaveFailed as error:
                if save.told:
                    raise
                self.progress.notice(f"a copy in memory is lost: {error.message}")
                save.forget()


def _seen(after: ProcessPlan, slots: Mapping[str, Sequence[Slot]]) -> ProcessPlan:
    """The plan with the senders beside the engines where these are, which have stayed and may not be where a run would
    place them that starts so. Raises ConfigError if one has no sender beside it and needs one."""
    if after.device == "cpu" or not after.senders or ENGINES not in slots:
        return after
    numbers: dict[Bundle, int] = {}
    ranks, receivers = (
        [numbers.setdefault(bundle, len(numbers)) for slot in slots[name] for bundle in slot.bundles]
        for name in (ACTOR, ENGINES)
    )
    found = senders(receivers, ranks, one_machine=False)
    if not found and transport_named(after.transport).one_device:
        raise ConfigError(
            f"weights.transport: {after.transport!r}, but engines that stay would be on devices without {ACTOR} ranks; "
            "choose other sizes"
        )
    return evolve(after, senders=found)


def with_devices(plan: EnginePlan, slots: Sequence[Slot]) -> list[EngineAssignment]:
    """The engines' assignments, with the devices of their slots."""
    return [
        evolve(assignment, context=evolve(assignment.context, devices=slot.devices))
        for assignment, slot in zip(plan.assignments, slots, strict=True)
    ]


def _engines(plan: ProcessPlan) -> Sequence[object]:
    return plan.engine.assignments if plan.engine is not None else ()


def _others(before: RolePlan, after: RolePlan) -> bool:
    """Whether the ranks are to be others. What a plan says of the checkpoint to begin with does not matter any more."""

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


def _room_for(residency: Residency, role: Role) -> str:
    """The stage in which a role's state is awake, if it has any, and nothing else is."""
    return training(role.name) if role.loss is not None and role.name in residency.groups else REST


def _shape(plan: RolePlan) -> str:
    ranks = len(plan.assignments)
    return f"{ranks} rank{'s' * (ranks > 1)} of {plan.backend.name} (dp {plan.data_parallel})"


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"
