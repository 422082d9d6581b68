"""Start a run's processes, on a pool of bundles: the ranks of its roles, and its engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from corerl.calls import Future, wait_all
from corerl.cluster.group import RayGroup
from corerl.cluster.heartbeat import Pending, Watching
from corerl.cluster.placement import ResourcePool, Slot, reserved
from corerl.cluster.process import CallResult
from corerl.cluster.runtime import CPUS, ray_session
from corerl.config.schema import ClusterConfig, RolloutConfig
from corerl.driver.groups import with_devices
from corerl.driver.progress import Progress
from corerl.driver.sampling import rows_of_a_call
from corerl.engines.fleet import EngineFleet
from corerl.errors import CorerlError, EngineFailed, WorkerDied
from corerl.event_loop import EventLoop
from corerl.observability.timing import Spans
from corerl.plan.processes import ENGINES, EnginePlan, ProcessPlan
from corerl.plugin.events import CallFinished
from corerl.plugin.spec import ACTOR
from corerl.trainer.group import TrainGroup


@frozen(kw_only=True)
class Started:
    """Processes that are ready."""

    train_groups: Mapping[str, TrainGroup]  # by role
    fleet: EngineFleet | None  # None if nothing is sampled
    pool: ResourcePool


def start_processes(
    processes: ProcessPlan,
    cluster: ClusterConfig,
    rollout: RolloutConfig,
    loop: EventLoop,
    progress: Progress,
    stack: contextlib.ExitStack,
    *,
    traces: bool = False,
) -> Started:
    """Start the ranks of each role and the engines; returns when all are ready. `stack` ends them. If `traces`, each
    call that a process has answered is an event."""
    engine = processes.engine
    progress.begin("starting Ray")
    cpus = max(processes.placement.cpus, CPUS)
    owns_ray = stack.enter_context(ray_session(address=cluster.address, cpus=cpus))
    pool = stack.enter_context(reserved(processes.placement, release=not owns_ray))
    progress.begin("starting ranks and engines" if engine is not None else "starting ranks")
    on_answer = functools.partial(emit_call, progress) if traces else None
    watching = Watching.of(cluster, progress.notice, on_answer)
    groups: dict[str, TrainGroup] = {}
    for name, role in processes.roles.items():
        groups[name] = TrainGroup.launch(role, pool[name], watching=watching)
        stack.callback(lambda group: group.processes.kill(), groups[name])  # those of then: ranks may have restarted
    fleet: EngineFleet | None = None
    if engine is not None:
        fleet = make_fleet(engine, pool[ENGINES], watching, loop, rollout, progress.spans)
        stack.callback(loop.close)  # after its engines have ended, before Ray does
        stack.callback(fleet.end)
    restarts = processes.roles[ACTOR].train.restarts
    in_turns = bool(processes.colocated_roles)
    load_all(groups, fleet, progress, in_turns=in_turns, restarts=restarts)
    return Started(train_groups=groups, fleet=fleet, pool=pool)


def emit_call(progress: Progress, process: str, pending: Pending, result: CallResult) -> None:
    """Report a call that `process` has answered."""
    progress.emit(
        CallFinished(
            process=process,
            verb=result.method,
            call=pending.method,
            asked=pending.asked,
            started=result.started,
            ended=result.ended,
            lane=result.lane,
            error=result.error.message if result.error else "",
            spans=result.spans,
            waits=result.waits,
        )
    )


def load_all(
    groups: Mapping[str, TrainGroup],
    fleet: EngineFleet | None,
    progress: Progress,
    *,
    in_turns: bool,
    restarts: int,
) -> None:
    """Start all groups and the engines at once. If they take turns in memory, engines load first and then sleep: an
    engine may size itself by the free memory it finds. Meanwhile ranks do what takes none, so that one that cannot
    start ends the run before the engines have loaded. If a rank dies as it starts, all are restarted, up to `restarts`
    times; those whose turn has not come, when it comes."""

    def allow_restart(error: WorkerDied) -> None:
        nonlocal restarts
        if not restarts:
            raise error
        restarts -= 1
        progress.notice(f"{error.message}; restarting all ranks")

    starting: dict[str, Future[Any]] = {}
    died = False
    if fleet is not None and in_turns:
        progress.begin("loading the model into engines, which will sleep while the ranks load")
        loading = fleet.start()
        constructing: dict[str, Future[Any]] = {name: group.construct() for name, group in groups.items()}
        try:
            wait_all({ENGINES: loading, **constructing})
        except WorkerDied as error:
            allow_restart(error)
            died = True
        _replace(fleet, loading.result(), progress)
        fleet.sleep()
    elif fleet is not None:
        starting[ENGINES] = fleet.start()
    progress.begin(f"loading the model into ranks{' and engines' * (ENGINES in starting)}")
    starting |= {name: group.restart() if died else group.init() for name, group in groups.items()}
    while True:
        try:
            results = wait_all(starting)
            break
        except WorkerDied as error:
            allow_restart(error)
            starting |= {name: group.restart() for name, group in groups.items()}
    if fleet is not None and not in_turns:
        _replace(fleet, results[ENGINES], progress)


def _replace(fleet: EngineFleet, died: Mapping[str, CorerlError], progress: Progress) -> None:
    """Put new engines in the place of those that have died as they started."""
    for engine, error in died.items():
        progress.notice(f"{engine} is replaced: {error.message}")
    if died:
        fleet.replace(died)


def make_fleet(
    plan: EnginePlan,
    slots: Sequence[Slot],
    watching: Watching,
    loop: EventLoop,
    rollout: RolloutConfig,
    spans: Spans,
) -> EngineFleet:
    """Start a process for each replica, on the devices of its slot; returns at once."""
    assignments = with_devices(plan, slots)
    processes = RayGroup(
        [assignment.context.name for assignment in assignments],
        "corerl.engines.service:EngineService",
        slots,
        plan.environment,
        failure=EngineFailed,
        threads=plan.calls + 1,  # besides those that generate: `pause`
        watching=watching,
    )
    return EngineFleet(
        processes,
        assignments,
        loop,
        calls=plan.calls,
        width=lambda replicas: rows_of_a_call(rollout, replicas=replicas, calls=plan.calls),
        restarts=rollout.restarts,
        span=spans,
    )
