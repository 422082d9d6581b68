"""Change a run's groups by another plan: between two steps, or where processes have ended and are about to restart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import evolve

from corerl.cluster import Slot
from corerl.driver import RunGroups, with_colocated_ranks, with_devices
from corerl.errors import ConfigError, CorerlError, ResizeFailed, UserError
from corerl.plan import ENGINES, REST, Plan
from corerl_elastic import sizes, slots


def sizes_of(run: RunGroups) -> dict[str, int]:
    """Ranks by role, and replicas, under the names of their settings."""
    found = {f"roles.{name}.ranks": len(role.assignments) for name, role in run.plan.processes.roles.items()}
    if run.plan.processes.engine is not None:
        found[sizes.REPLICAS] = _replicas(run.plan)
    return found


# ---- between two steps -----------------------------------------------------------------------------------------------


def resize(run: RunGroups, overrides: Sequence[str]) -> list[str]:
    """In `between_steps`: let ranks and engines be as overrides of the config say, such as "roles.actor.ranks=4";
    returns a line for each group that has changed, which is also a notice. If ranks change, all roles restart from a
    checkpoint of this step.

    Raises UserError or ResizeFailed if not all groups could be changed, once they are as before, and WorkerDied if
    ranks die, which `between_steps` lets pass: the run then goes on from its newest checkpoint."""
    if run.save is None:
        raise ResizeFailed(
            "corerl_elastic.resize: a run is resized in the hook between_steps alone; there is no step here"
        )
    plan, before, places, began = sizes.resized(run.plan, overrides), run.plan, dict(run.pool), time.monotonic()
    _require_same_surroundings(before, plan)
    restarts = any(_differ(before, plan, name) for name in before.processes.roles)
    replicas = _replicas(before), _replicas(plan)
    if not restarts and replicas[0] == replicas[1]:
        return []
    staying = {} if restarts else {name: len(run.pool[name]) for name in run.roles}
    if replicas[1]:
        staying[ENGINES] = min(replicas)
    try:
        after = _arranged(run, plan, staying)
        with_colocated_ranks(plan.processes, after)  # raises before anything ends
        checkpoint = run.save() if restarts else None
        try:
            _become(run, plan, after, checkpoint)
        except CorerlError as error:
            _become(run, before, places, checkpoint)
            if isinstance(error, UserError | ResizeFailed):
                raise
            raise ResizeFailed(f"{error.message}; all groups are as before") from error
        run.follow(plan)
    finally:
        run.pool.take({})  # gives back what was reserved for processes that have ended, or did not come
    seconds = time.monotonic() - began
    lines = [f"{line}, {seconds:.1f} s" for line in _changes(before, plan)]
    for line in lines:
        run.notice(line)
    return lines


def _arranged(run: RunGroups, plan: Plan, staying: Mapping[str, int]) -> dict[str, Sequence[Slot]]:
    try:
        return slots.arranged(run.pool, plan.processes.placement, staying)
    except CorerlError as error:  # no room, a machine that does not fit, or a GPU that does not answer
        raise ResizeFailed(error.message) from error


def _become(run: RunGroups, plan: Plan, after: Mapping[str, Sequence[Slot]], checkpoint: Path | None) -> None:
    """Engines that are too many end first and missing ones start last: so devices can pass from one side to the other.
    In between all ranks restart from the checkpoint, if there is one."""
    with run.progress.phase("resize"):
        _resize_engines(run, plan, after, smaller=True)
        if checkpoint is not None:
            run.changed |= run.roles.keys()
            for role in run.roles.values():
                if not role.group.processes.ended:
                    role.group.shutdown("resized")
            run.end_ranks()
            run.pool.take({name: after[name] for name in run.roles}, give_back=False)
            run.plan = plan
            run.start_ranks(checkpoint)
        _resize_engines(run, plan, after, smaller=False)
    run.plan = plan


def _resize_engines(run: RunGroups, plan: Plan, after: Mapping[str, Sequence[Slot]], *, smaller: bool) -> None:
    engine = plan.processes.engine
    if run.fleet is None or engine is None:
        return
    now, wanted = len(run.fleet), len(engine.assignments)
    if wanted == now or (wanted < now) is not smaller:
        return
    run.changed.add(ENGINES)
    if not smaller:
        run.residency.enter(REST)  # new engines load where ranks may be
    run.fleet.resize(with_devices(engine, after[ENGINES]), after[ENGINES])
    run.pool.take({ENGINES: after[ENGINES]}, give_back=False)
    run.residency.engines_changed()


# ---- where processes have ended --------------------------------------------------------------------------------------


def restart_by(run: RunGroups, plan: Plan, *, staying: Sequence[str]) -> None:
    """In `ranks_failed`: let what is about to start do so by this plan, on the devices that are left; roles that are
    `staying` go on. A notice says which sizes have changed. Raises CorerlError if there is no place for a group."""
    before = run.plan
    _require_same_surroundings(before, plan)
    engines = [ENGINES] if run.fleet is not None else []
    found = slots.without_lost(run.pool, plan.processes.placement, [*staying, *engines])
    with_colocated_ranks(plan.processes, found)  # raises before anything is taken
    run.pool.take(found)
    run.follow(plan)
    run.seat_engines()
    for line in _changes(before, plan):
        run.notice(line)


# ---- two plans -------------------------------------------------------------------------------------------------------


def _replicas(plan: Plan) -> int:
    return 0 if plan.processes.engine is None else len(plan.processes.engine.assignments)


def _changes(before: Plan, after: Plan) -> Iterator[str]:
    """A line for each group that is another after a change."""
    for name in before.processes.roles:
        if _differ(before, after, name):
            yield f"{name}: {_shape(before, name)} -> {_shape(after, name)}"
    if _replicas(before) != _replicas(after):
        yield f"engines: {_replicas(before)} -> {_replicas(after)}"


def _differ(before: Plan, after: Plan, name: str) -> bool:
    """Whether two plans of a role differ in more than the checkpoint to start from."""

    def seen(plan: Plan) -> object:
        role = plan.processes.roles[name]
        assignments = [evolve(each, config=evolve(each.config, resume="")) for each in role.assignments]
        return assignments, dict(role.environment)

    return seen(before) != seen(after)


def _shape(plan: Plan, name: str) -> str:
    role = plan.processes.roles[name]
    ranks = len(role.assignments)
    return f"{ranks} rank{'s' * (ranks > 1)} of {role.backend.name} (dp {role.data_parallel})"


def _require_same_surroundings(before: Plan, after: Plan) -> None:
    """Raise ConfigError if more than sizes would have to change."""
    transport, other = before.processes.transport, after.processes.transport
    if (transport, dict(before.processes.common)) != (other, dict(after.processes.common)):
        raise ConfigError(
            f"weights.transport: {transport!r} while the run goes on, but these sizes need {other!r}; set "
            f"weights.transport='{other}' from the start, or choose other sizes"
        )
