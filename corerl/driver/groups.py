"""Change the sizes of a run's groups between its steps: ranks hand their state over, engines come and go."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import define, evolve

from corerl.cluster.placement import Bundle, Room, Slot
from corerl.driver.checkpoints import Checkpoints
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.driver.roles import Role
from corerl.driver.run_dir import write_config
from corerl.driver.scaling import Devices
from corerl.driver.updates import WeightUpdates
from corerl.engines.service import EngineAssignment
from corerl.errors import ConfigError, CorerlError, NoPlaces, ResizeFailed, SaveFailed, UserError, WorkerDied
from corerl.messages import one_line
from corerl.plan.plan import Plan
from corerl.plan.processes import EnginePlan, ProcessPlan
from corerl.plan.residency import REST, training
from corerl.plan.roles import RolePlan
from corerl.plan.sizes import REPLICAS, of_engines
from corerl.plan.transports import ENGINES, senders
from corerl.plugin.spec import ACTOR
from corerl.weights.transport import Address
from corerl.weights.transports import TRANSPORTS

OF_ROLE = re.compile(r"\s*roles\.(\w+)\.")


@define(kw_only=True, eq=False)
class Sizes:
    """The sizes of a run's groups, which its loop may change between two steps."""

    plan: Plan  # of the groups as they are
    room: Room
    roles: Mapping[str, Role]
    updates: WeightUpdates | None
    saves: Sequence[Checkpoints]
    residency: Residency
    progress: Progress
    address_of: Callable[[ProcessPlan, Sequence[str]], Address]  # of updates to these receivers

    @property
    def now(self) -> dict[str, int]:
        """Ranks by role, and replicas, under the names of their settings."""
        processes = self.plan.processes
        sizes = {f"roles.{name}.ranks": len(role.assignments) for name, role in processes.roles.items()}
        if processes.engine is not None:
            sizes[REPLICAS] = len(processes.engine.assignments)
        return sizes

    @property
    def devices(self) -> Devices:
        reserved, unused, free = self.room.count(self.plan.processes.placement.bundle)
        return Devices(reserved=reserved, unused=unused, free=free)

    def change(self, overrides: Sequence[str]) -> Iterator[str]:
        """Change the groups as the overrides of the config say; yields a line for each that has changed. Engines that
        are to end do so first, those to come start last: so devices can pass from one side to the other.

        Raises UserError or ResizeFailed for the first group that could not be changed, which then is as before;
        WorkerDied if ranks die."""
        wanted = self.plan.resized(overrides)  # raises for all that is wrong with it
        engines = [each for each in overrides if of_engines(each)]
        parts = _by_role([each for each in overrides if not of_engines(each)])
        fewer = len(_engines(wanted.processes)) < len(_engines(self.plan.processes))
        plans: list[Plan] = []  # one after the other, so that the last one made is always of the groups as they are
        for part in [engines, *parts] if fewer else [*parts, engines]:
            if part:
                plans.append((plans[-1] if plans else self.plan).resized(part))
                _require_same_surroundings(self.plan.processes, plans[-1].processes)
        for plan in plans:
            yield from self._change(plan)

    def _change(self, plan: Plan) -> Iterator[str]:
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

    # ---- machines that are gone -------------------------------------------------------------------------------------

    def refit(self) -> list[str]:
        """Find places for the processes of machines that are gone: where the cluster has put their bundles, or else, in
        smaller groups, on the devices that are left. Ranks have ended, and are to be started anew, by the plan and in
        the room as they are then; engines are to be replaced. Returns a line for each group whose size has changed, and
        for each device that did not answer. Raises NoPlaces if a group cannot be so small, or has no place."""
        self.room.settle(within=self.plan.cluster.spare_timeout)
        return self._refit(staying=[])

    def refit_engines(self) -> list[str]:
        """The same while ranks are there, which stay. If one is on a machine that is gone, or they are to make room for
        engines, the role's are ended, and WorkerDied says so."""
        self.room.settle(within=self.plan.cluster.spare_timeout)
        for name, role in self.roles.items():
            for rank, (slot, node) in enumerate(zip(self.room[name], role.group.processes.nodes, strict=True)):
                if slot.lost or slot.node != node:
                    role.group.processes.kill()
                    raise WorkerDied(f"{name} rank {rank}: its machine is gone")
        placement = self.plan.processes.placement
        if self.room.left(placement, ENGINES) + self.room.unused < placement.widths.get(ENGINES, 1):
            self.roles[ACTOR].group.processes.kill()
            raise WorkerDied(f"{ACTOR}: its ranks were ended to make room for engines, as no device of theirs is left")
        return self._refit(staying=[*self.roles])

    def _refit(self, *, staying: Sequence[str]) -> list[str]:
        """`staying`: roles whose ranks are alive and are not started anew."""
        engines = [ENGINES] if self.updates is not None else []
        groups = [*self.roles, *engines]
        lost = any(slot.lost for name in groups for slot in self.room[name])
        lines: list[str] = []
        if lost:
            lines += self.room.silent
            try:
                plan = self._fewer(groups)
                found = self.room.refit(plan.processes.placement, [*staying, *engines])
                seen = _seen(plan.processes, found)
            except CorerlError as error:
                raise NoPlaces("; ".join([error.message, *lines])) from error
            before, after = self.plan.processes, plan.processes
            self.room.take(found)
            self.plan = plan
            write_config(plan.start.run_dir, plan.record)
            for name, role in before.roles.items():
                if len(role.assignments) != len(after.roles[name].assignments):
                    lines.append(f"{name}: {_shape(role)} -> {_shape(after.roles[name])}")
            if len(_engines(before)) != len(_engines(after)):
                lines.append(f"engines: {len(_engines(before))} -> {len(_engines(after))}")
        if self.updates is not None and (engine := self.plan.processes.engine) is not None:
            slots = self.room[ENGINES]
            self.updates.fleet.reseat(with_devices(engine, slots), slots)
            if lost:  # an engine may be beside another rank now, also where it is one of as many
                self.updates.meets_at(functools.partial(self.address_of, seen))
        return lines

    def _fewer(self, groups: Sequence[str]) -> Plan:
        """A plan for as many processes of each group as devices are left for. Devices that nobody uses go to groups
        that have lost some, first to those that have none. One that still has none gets some of the group that has
        most: as many as it had, but half of them at most. Raises UserError if there is none."""
        plan, placement = self.plan, self.plan.processes.placement
        sizes = {name: len(self.room[name]) for name in groups}
        widths = {name: placement.widths.get(name, 1) for name in groups}
        pools = {name: name if name in placement.apart else "" for name in groups}  # "" is of those that share theirs
        bundles = {pool: self.room.left(placement, name) for name, pool in pools.items()}
        had, least = dict.fromkeys(bundles, 0), dict.fromkeys(bundles, 0)
        for name, pool in pools.items():
            had[pool], least[pool] = max(had[pool], sizes[name] * widths[name]), max(least[pool], widths[name])
        unused = self.room.unused
        for wanted in (least, had):
            for pool, count in bundles.items():
                given = max(0, min(unused, wanted[pool] - count))
                bundles[pool] += given
                unused -= given
        for pool in [pool for pool, count in bundles.items() if count < least[pool]]:
            giver = max(bundles, key=lambda each: bundles[each])
            given = min(had[pool] - bundles[pool], bundles[giver] // 2)
            bundles[pool] += given
            bundles[giver] -= given
        for name, size in sizes.items():
            left = bundles[pools[name]] // widths[name]
            if left < size:
                plan = _largest(plan, REPLICAS if name == ENGINES else f"roles.{name}.ranks", size, left)
        _require_same_surroundings(self.plan.processes, plan.processes)
        return plan

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
    if not found and TRANSPORTS[after.transport].one_device:
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


def _largest(plan: Plan, setting: str, now: int, left: int) -> Plan:
    """The plan with as much of the setting as it can have, `left` at most. Raises ConfigError if it can have none."""
    refused: UserError | None = None
    for size in range(left, 0, -1):
        try:
            return plan.resized([f"{setting}={size}"])
        except UserError as error:
            refused = refused or error
    why = f", where it cannot be that or less: {one_line(refused)}" if refused is not None else ""
    raise ConfigError(f"{setting}: devices are left for {left} of {now}{why}") from refused


def _by_role(overrides: Sequence[str]) -> list[list[str]]:
    """Overrides that are each of one role, by role; all together if any is of several."""
    names = [OF_ROLE.match(each) for each in overrides]
    found: dict[str, list[str]] = {}
    for override, name in zip(overrides, names, strict=True):
        found.setdefault(name[1] if name is not None and all(names) else "", []).append(override)
    return list(found.values())


def _engines(plan: ProcessPlan) -> Sequence[object]:
    return plan.engine.assignments if plan.engine is not None else ()


def _others(before: RolePlan, after: RolePlan) -> bool:
    """Whether the ranks are to be others. What a plan says of the checkpoint to begin with does not matter any more."""

    def seen(plan: RolePlan) -> object:
        assignments = [evolve(each, config=evolve(each.config, resume="")) for each in plan.assignments]
        return assignments, dict(plan.environment), plan.resources

    return seen(before) != seen(after)


def _require_same_surroundings(before: ProcessPlan, after: ProcessPlan) -> None:
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
