"""Turn a config into a running `Run`, in processes that all end with it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corerl.calls import Future, wait_all
from corerl.checkpoint.commit import Faults, latest
from corerl.cluster.group import RayGroup
from corerl.cluster.heartbeat import Pending, Watching
from corerl.cluster.placement import ResourcePool, Slot, reserved
from corerl.cluster.process import CallResult
from corerl.cluster.runtime import CPUS, ray_session
from corerl.config.schema import RolloutConfig
from corerl.driver.checkpoints import Checkpoints, MemoryCheckpoints, Saves
from corerl.driver.control import Control, StopRequest
from corerl.driver.earlier_policies import EarlierPolicies
from corerl.driver.evaluations import Evaluations
from corerl.driver.groups import Groups, with_devices
from corerl.driver.logprob_check import LogprobCheck
from corerl.driver.progress import Progress
from corerl.driver.recovery import Recovery
from corerl.driver.residency import Residency
from corerl.driver.roles import Role, roles_of
from corerl.driver.run import Run
from corerl.driver.run_dir import occupied, write_config
from corerl.driver.sampling import Sampling, rows_of_a_call, start_rewards
from corerl.driver.step_reports import StepNotices, StepReports
from corerl.driver.updates import WeightUpdates
from corerl.engines.fleet import EngineFleet
from corerl.errors import CheckpointDamaged, CorerlError, EngineFailed, SaveFailed, WorkerDied
from corerl.event_loop import EventLoop
from corerl.messages import one_line
from corerl.observability.jsonl import NoticeFile
from corerl.observability.timing import Spans
from corerl.plan.plan import Plan
from corerl.plan.processes import ENGINES, EnginePlan
from corerl.plan.residency import residency_plan
from corerl.plan.resume import Start
from corerl.plugin import hooktrace
from corerl.plugin.events import CallFinished, RunFinished, RunStarted
from corerl.plugin.observers import load_observers, traced
from corerl.plugin.spec import ACTOR
from corerl.rollout.source import Policies
from corerl.trainer.group import TrainGroup
from corerl.types import InitResult


@contextlib.contextmanager
def launch(planned: Callable[[Faults], Plan]) -> Iterator[Run]:
    """Start a run's processes; none survives the block, however it ends. Observers get errors.

    `planned` makes the run's plan, which resumes from none of the checkpoints that ranks have found to be damaged: with
    `checkpoint.resume = "auto"`, one that they do is passed over for an older one, and the run starts again."""
    began = time.monotonic()
    damaged: dict[Path, str] = {}
    with contextlib.ExitStack() as stack:
        while True:
            plan = planned(damaged)
            try:
                run = stack.enter_context(_launched(plan, damaged, began))
                break
            except CheckpointDamaged:
                if plan.start.resume not in damaged:
                    raise
        yield run


@contextlib.contextmanager
def _launched(plan: Plan, damaged: dict[Path, str], began: float) -> Iterator[Run]:
    """The run, once it has started; `began` is when it was launched. If ranks find its checkpoint to be damaged, and it
    may fall back to another, the checkpoint is added to `damaged` before that is raised."""
    start = plan.start
    with occupied(start.run_dir):
        write_config(start.run_dir, plan.record)
        own = [("notices", NoticeFile(str(start.run_dir)))]
        observers = load_observers(plan.extensions, str(start.run_dir), own)
        progress = Progress(observers, plan.first_step, began=began)
        try:
            progress.emit(
                RunStarted(
                    run_dir=str(start.run_dir),
                    steps=plan.run.steps,
                    first_step=progress.steps_done,
                    title=plan.title,
                    mode=plan.run.mode,
                    same_run=start.same_run,
                )
            )
            for text in (*start.lost, *plan.notices):
                progress.notice(text)
            with contextlib.ExitStack() as stack:
                stack.enter_context(progress.beating())
                stop = stack.enter_context(StopRequest(progress.notice))
                try:
                    run = _assemble(plan, progress, stop, stack)
                except CheckpointDamaged as error:
                    if start.resume is not None and start.resumed is not None:
                        damaged[start.resume] = error.message
                    raise
                with _rescuing(run):
                    yield run
                _close(run)
        except BaseException as error:
            _end_observers(progress, start, error, damaged)
            raise
        observers.shutdown("finished")


def _end_observers(progress: Progress, start: Start, error: BaseException, damaged: Faults) -> None:
    """Let observers know that the run has failed, or starts again from an older checkpoint."""
    if isinstance(error, WorkerDied):  # calls of engines do not say at which step they are
        error.add_note(f"the run ended in step {progress.steps_done + 1}")
    falls_back = start.resumed if isinstance(error, CheckpointDamaged) and start.resume in damaged else None
    if falls_back is not None and latest(falls_back, damaged=damaged) is not None:
        progress.observers.shutdown("restarted")
        return
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    progress.emit(
        RunFinished(
            reason=reason,
            steps_done=progress.steps_done,
            seconds=progress.elapsed,
            artifacts={"run directory": str(start.run_dir)},
        )
    )
    progress.observers.shutdown(reason)


@contextlib.contextmanager
def _rescuing(run: Run) -> Iterator[None]:
    """If the block fails, still complete a checkpoint that was being written in the background."""
    try:
        yield
    except SaveFailed:
        raise  # the save itself is what failed
    except Exception:  # not a KeyboardInterrupt, a second signal: that stops at once and saves nothing
        try:
            run.saves.disk.rescue()
        except Exception as error:
            run.progress.notice(f"the checkpoint being written is lost: {one_line(error)}")
        raise


def _close(run: Run) -> None:
    """End what has done its work."""
    run.sampling.source.close()
    if run.saves.memory is not None:
        with contextlib.suppress(SaveFailed):  # of a checkpoint that nobody needs any more
            run.saves.memory.complete(wait=True)
    for role in run.roles.values():
        role.group.shutdown("finished")
    if run.updates is not None:
        run.updates.fleet.close()


def _assemble(plan: Plan, progress: Progress, stop: StopRequest, stack: contextlib.ExitStack) -> Run:
    start, trains = plan.start, plan.run.trains
    loop = EventLoop("rollout")
    stack.callback(loop.close)
    rewards = start_rewards(plan, loop, progress, stack)  # first: their processes start while Ray does
    groups, fleet, inits, pool = _start_processes(plan, loop, progress, stack)
    roles = roles_of(plan, groups, inits, notify=progress.notice)
    trained = {name: role for name, role in roles.items() if role.loss is not None}
    tags = plan.algorithm.snapshots(ACTOR) if trains else ()
    earlier = EarlierPolicies(group=groups[ACTOR], tags=tags, settings=plan.algorithm.settings, progress=progress)
    earlier.begin(resumed=bool(start.state))
    sampling = Sampling(plan=plan, fleet=fleet, loop=loop, rewards=rewards, progress=progress, stack=stack)
    residency = _residency(plan, roles, fleet, progress)

    processes = Groups(plan=plan, pool=pool, roles=roles, fleet=fleet, residency=residency, progress=progress)
    control = Control(groups=processes, progress=progress, stop=stop)
    updates = None
    if fleet is not None:
        updates = WeightUpdates(
            config=plan.weights,
            group=groups[ACTOR],
            fleet=fleet,
            address_of=processes.update_address,
            separate_adapters=plan.processes.separate_adapters,
            # The first weights are sent as the version that they had.
            policies=Policies(version=inits[ACTOR].weights_version - 1),
            residency=residency,
            control=control,
            progress=progress,
        )
    checkpoints = Checkpoints(
        run_dir=start.run_dir,
        config=plan.checkpoint,
        roles=trained,
        newest=start.resume,
        last_step=progress.steps_done if start.state else -1,
        progress=progress,
    )
    in_memory = plan.checkpoint.memory and trains
    memory = stack.enter_context(MemoryCheckpoints.of_run(checkpoints)) if in_memory else None
    saves = Saves(disk=checkpoints, memory=memory, residency=residency)
    run = Run(
        plan=plan,
        progress=progress,
        roles=roles,
        updates=updates,
        earlier=earlier,
        logprob_check=LogprobCheck.of(plan, sampling.sampler, progress),
        residency=residency,
        sampling=sampling,
        evaluations=Evaluations(plan=plan, sampling=sampling, progress=progress),
        saves=saves,
        recovery=Recovery(control=control, updates=updates, saves=saves, start=start),
        control=control,
        reports=StepReports(
            recomputes=plan.algorithm.settings.old_logprobs == "recompute",
            roles=roles,
            fleet=fleet,
            residency=residency,
            progress=progress,
            notices=StepNotices.of_run(plan),
            placeholder=None if plan.rollout.pictures is None else plan.rollout.pictures.placeholder,
        ),
    )
    if fleet is not None:
        progress.begin("sending the first weights")
    return run


def _residency(plan: Plan, roles: Mapping[str, Role], fleet: EngineFleet | None, progress: Progress) -> Residency:
    sharing = plan.processes.sharing
    return Residency(
        plan=residency_plan(
            sharing,
            passed={each.role for each in plan.algorithm.passes},
            frozen={name for name, role in roles.items() if role.loss is None},
            sleeps=plan.cluster.offload_kinds,
        ),
        groups={name: roles[name].group for name in sharing},
        fleet=fleet,
        progress=progress,
        measures=plan.cluster.offload == "auto",
    )


def _start_processes(
    plan: Plan, loop: EventLoop, progress: Progress, stack: contextlib.ExitStack
) -> tuple[dict[str, TrainGroup], EngineFleet | None, dict[str, InitResult], ResourcePool]:
    """Start the ranks of each role and the engines, on a pool of bundles; returns when all are ready. `stack`
    ends them."""
    processes, engine = plan.processes, plan.processes.engine
    progress.begin("starting Ray")
    cpus = max(processes.placement.cpus, CPUS)
    owns_ray = stack.enter_context(ray_session(address=plan.cluster.address, cpus=cpus, forward=hooktrace.wanted()))
    pool = stack.enter_context(reserved(processes.placement, release=not owns_ray))
    progress.begin("starting ranks and engines" if engine is not None else "starting ranks")
    on_answer = functools.partial(emit_call, progress) if traced(plan.extensions) else None
    watching = Watching.of(plan.cluster, progress.notice, on_answer)
    groups: dict[str, TrainGroup] = {}
    for name, role in processes.roles.items():
        groups[name] = TrainGroup.launch(role, pool[name], watching=watching)
        stack.callback(functools.partial(_end, groups[name]))
    fleet: EngineFleet | None = None
    if engine is not None:
        fleet = make_fleet(engine, pool[ENGINES], watching, loop, plan.rollout.settings, progress.spans)
        stack.callback(loop.close)  # after its engines have ended, before Ray does
        stack.callback(fleet.end)
    restarts = processes.roles[ACTOR].train.restarts
    in_turns = bool(processes.sharing)
    started = load_all(groups, fleet, progress, in_turns=in_turns, restarts=restarts)
    return groups, fleet, started, pool


def _end(group: TrainGroup) -> None:
    group.processes.kill()  # of now: ranks may have restarted


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
) -> dict[str, InitResult]:
    """Start all groups and the engines at once. If they take turns in memory, engines load first and then sleep: an
    engine may size itself by the free memory it finds. Meanwhile ranks do what takes none, so that one that cannot
    start ends the run before the engines have loaded. If a rank dies as it loads, all are restarted, up to `restarts`
    times."""
    starting: dict[str, Future[Any]] = {}
    if fleet is not None and in_turns:
        progress.begin("loading the model into engines, which will sleep while the ranks load")
        starting = {name: group.construct() for name, group in groups.items()}
        _replace(fleet, wait_all({ENGINES: fleet.start(), **starting})[ENGINES], progress)
        fleet.sleep()
        progress.begin("loading the model into ranks")
    elif fleet is not None:
        progress.begin("loading the model into ranks and engines")
        starting[ENGINES] = fleet.start()
    else:
        progress.begin("loading the model into ranks")
    starting |= {name: group.init() for name, group in groups.items()}
    while True:
        try:
            results = wait_all(starting)
            break
        except WorkerDied as error:
            if not restarts:
                raise
            restarts -= 1
            progress.notice(f"{error.message}; restarting all ranks")
            starting |= {name: group.restart() for name, group in groups.items()}
    if fleet is not None and not in_turns:
        _replace(fleet, results[ENGINES], progress)
    return {name: results[name] for name in groups}


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
