"""Turn a config into a running `Run`, in processes that all end with it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.calls import Future, wait_all
from corerl.checkpoint.commit import Faults, latest
from corerl.cluster.group import RayGroup
from corerl.cluster.heartbeat import Pending, Watching
from corerl.cluster.nodes import elsewhere
from corerl.cluster.placement import ResourcePool, Slot, reserved
from corerl.cluster.process import CallResult
from corerl.cluster.runtime import CPUS, ray_session
from corerl.config.schema import ClusterConfig, RolloutConfig
from corerl.driver.checkpoints import ON_OTHERS, Checkpoints, MemoryCheckpoints
from corerl.driver.control import Control
from corerl.driver.groups import Groups, with_devices
from corerl.driver.logprob_check import LogprobCheck
from corerl.driver.progress import Progress
from corerl.driver.recovery import Recovery
from corerl.driver.residency import Residency
from corerl.driver.roles import Role, roles_of
from corerl.driver.run import Run
from corerl.driver.run_dir import occupied, write_config
from corerl.driver.sampling import Sampling, rows_of_a_call, start_rewards
from corerl.driver.snapshots import Snapshots
from corerl.driver.step_notices import StepNotices
from corerl.driver.stop import StopRequest
from corerl.driver.updates import WeightUpdates
from corerl.engines.fleet import EngineFleet
from corerl.errors import CheckpointDamaged, CorerlError, EngineFailed, SaveFailed, WorkerDied
from corerl.event_loop import EventLoop
from corerl.messages import one_line
from corerl.observability.notices import NoticeFile
from corerl.observability.timing import Spans
from corerl.plan.plan import Plan
from corerl.plan.processes import ENGINES, EnginePlan, ProcessPlan
from corerl.plan.residency import residency_plan
from corerl.plan.resume import skipping
from corerl.plugin import hooktrace
from corerl.plugin.events import CallFinished, RunFinished, RunStarted
from corerl.plugin.observers import load_observers, traced
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import transport_named
from corerl.trainer.group import TrainGroup
from corerl.types import InitResult
from corerl.weights.transport import Address

RESERVED_WITHIN = 60.0  # seconds for a cluster to free what a run asks for


@contextlib.contextmanager
def launch(planned: Callable[[Faults], Plan]) -> Iterator[Run]:
    """Start a run's processes; none survives the block, however it ends. Observers get errors.

    `planned` makes the run's plan, which resumes from none of the checkpoints that ranks have found to be damaged: with
    `checkpoint.resume = "auto"`, one that they do is passed over for an older one, and the run starts again."""
    began = time.monotonic()
    damaged: dict[Path, str] = {}
    reported: set[str] = set()
    with contextlib.ExitStack() as stack:
        while True:
            plan = planned(damaged)
            start = evolve(plan.start, lost=tuple(line for line in plan.start.lost if line not in reported))
            reported.update(start.lost)
            try:
                run = stack.enter_context(_in_its_directory(evolve(plan, start=start), damaged, began))
            except CheckpointDamaged:
                if start.resume not in damaged:
                    raise
                reported.add(skipping(start.resume, damaged[start.resume]))
            else:
                break
        yield run


@contextlib.contextmanager
def _in_its_directory(plan: Plan, damaged: dict[Path, str], began: float) -> Iterator[Run]:
    with occupied(plan.start.run_dir):
        yield from _reported(plan, damaged, began)


def _reported(plan: Plan, damaged: dict[Path, str], began: float) -> Iterator[Run]:
    """The run, once it has started; `began` is when it was launched. If ranks find its checkpoint to be damaged, and it
    may fall back to another, the checkpoint is added to `damaged` before that is raised."""
    start = plan.start
    write_config(start.run_dir, plan.record)
    progress = Progress(
        load_observers(plan.extensions, str(start.run_dir), [("notices", NoticeFile(str(start.run_dir)))]),
        plan.first_step,
        watchdog=plan.cluster.watchdog,
        began=began,
    )
    try:
        progress.emit(
            RunStarted(
                run_dir=str(start.run_dir),
                steps=plan.run.steps,
                first_step=progress.step,
                title=plan.title,
                mode=plan.run.mode,
                same_run=start.same_run,
            )
        )
        for text in _notices(plan):
            progress.notice(text)
        with contextlib.ExitStack() as stack:
            stack.enter_context(progress.beating())
            stop = stack.enter_context(StopRequest(progress.notice, plan.run.mode))
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
        if isinstance(error, WorkerDied):  # calls of engines do not say at which step they are
            error.add_note(f"the run ended in step {progress.step + 1}")
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        lost = start.resume if isinstance(error, CheckpointDamaged) else None
        if lost in damaged and start.resumed is not None and latest(start.resumed, damaged=damaged) is not None:
            progress.notice(skipping(lost, damaged[lost]))  # before the checks of the next start
            progress.observers.shutdown("restarted")
            raise
        progress.emit(
            RunFinished(
                reason=reason,
                steps_done=progress.step,
                seconds=progress.elapsed,
                artifacts={"run directory": str(start.run_dir)},
            )
        )
        progress.observers.shutdown(reason)
        raise
    progress.observers.shutdown("finished")


@contextlib.contextmanager
def _rescuing(run: Run) -> Iterator[None]:
    """If the block fails, still complete a checkpoint that was being written in the background."""
    try:
        yield
    except SaveFailed:
        raise  # the save itself is what failed
    except Exception:  # not a KeyboardInterrupt, a second signal: that stops at once and saves nothing
        try:
            run.checkpoints.rescue()
        except Exception as error:
            run.progress.notice(f"the checkpoint being written is lost: {one_line(error)}")
        raise


def _close(run: Run) -> None:
    """End what has done its work."""
    run.sampling.source.close()
    if run.memory is not None:
        with contextlib.suppress(SaveFailed):  # of a checkpoint that nobody needs any more
            run.memory.complete(wait=True)
    for role in run.roles.values():
        role.group.shutdown("finished")
    if run.updates is not None:
        run.updates.fleet.close()


def _assemble(plan: Plan, progress: Progress, stop: StopRequest, stack: contextlib.ExitStack) -> Run:
    start, trains = plan.start, plan.run.trains
    loop = EventLoop("rollout")
    stack.callback(loop.close)
    rewards = start_rewards(plan, loop, progress, stack)  # first: their processes start while Ray does
    groups, fleet, inits, room = _start_processes(plan, loop, progress, stack)
    roles = roles_of(plan, groups, inits, notify=progress.notice)
    trained = {name: role for name, role in roles.items() if role.loss is not None}
    tags = plan.algorithm.snapshots(ACTOR) if trains else ()
    snapshots = Snapshots(group=groups[ACTOR], tags=tags, settings=plan.algorithm.settings)
    for text in snapshots.begin(progress.step, resumed=bool(start.state)):
        progress.notice(text)
    sampling = Sampling(plan=plan, fleet=fleet, loop=loop, rewards=rewards, progress=progress, stack=stack)
    residency = _residency(plan, roles, fleet, progress)

    address = functools.partial(address_of, run_dir=start.run_dir, cluster=plan.cluster)
    updates: WeightUpdates | None = None
    if fleet is not None:
        updates = WeightUpdates(
            config=plan.weights,
            group=groups[ACTOR],
            fleet=fleet,
            version=inits[ACTOR].weights_version,
            address_of=functools.partial(address, plan.processes),
            separate_adapters=plan.processes.separate_adapters,
            residency=residency,
            progress=progress,
        )
    checkpoints = Checkpoints(
        run_dir=start.run_dir,
        config=plan.checkpoint,
        roles=trained,
        newest=start.resume,
        last_step=progress.step if start.state else -1,
        progress=progress,
    )
    memory = None
    if plan.checkpoint.memory and trains and elsewhere(slot.node for name in trained for slot in room[name]):
        progress.notice(f"checkpoint.memory: no in-memory checkpoints: {ON_OTHERS}")
    elif plan.checkpoint.memory and trains:
        memory = stack.enter_context(MemoryCheckpoints.of_run(checkpoints))
    groups_now = Groups(
        plan=plan,
        room=room,
        roles=roles,
        updates=updates,
        residency=residency,
        progress=progress,
        address_of=address,
    )
    control = Control(groups=groups_now, progress=progress, stop=stop)
    run = Run(
        plan=plan,
        progress=progress,
        stop=stop,
        roles=roles,
        updates=updates,
        snapshots=snapshots,
        logprob_check=LogprobCheck.of(plan, sampling.sampler, progress),
        residency=residency,
        sampling=sampling,
        checkpoints=checkpoints,
        memory=memory,
        restarts=Recovery(control=control, checkpoints=checkpoints, memory=memory, start=start),
        control=control,
        notices=StepNotices.of_run(plan),
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
    """Start the ranks of each role and the engines, in a room of bundles; returns when all are ready. `stack`
    ends them."""
    processes, engine = plan.processes, plan.processes.engine
    progress.begin("starting Ray")
    cpus = max(processes.placement.cpus, CPUS)
    ends = stack.enter_context(ray_session(address=plan.cluster.address, cpus=cpus, forward=hooktrace.wanted()))
    room = stack.enter_context(reserved(processes.placement, timeout=RESERVED_WITHIN, release=not ends))
    progress.begin(f"starting {_counted(room)}")
    watching = Watching(
        notify=progress.notice,
        watchdog=plan.cluster.watchdog,
        health_timeout=plan.cluster.health_timeout,
        start_timeout=plan.cluster.start_timeout,
        on_answer=functools.partial(emit_call, progress) if traced(plan.extensions) else None,
    )
    groups: dict[str, TrainGroup] = {}
    for name, role in processes.roles.items():
        groups[name] = TrainGroup.launch(role, room[name], watching=watching)
        stack.callback(functools.partial(_end, groups[name]))
    fleet: EngineFleet | None = None
    if engine is not None:
        fleet = make_fleet(engine, room[ENGINES], watching, loop, plan.rollout.settings, progress.spans)
        stack.callback(loop.close)  # after its engines have ended, before Ray does
        stack.callback(fleet.end)
    restarts = processes.roles[ACTOR].train.restarts
    in_turns = bool(processes.sharing)
    started = load_all(groups, fleet, progress, in_turns=in_turns, restarts=restarts)
    return groups, fleet, started, room


def _end(group: TrainGroup) -> None:
    group.processes.kill()  # of now: ranks may have restarted


def address_of(processes: ProcessPlan, receivers: Sequence[str], run_dir: Path, cluster: ClusterConfig) -> Address:
    """The address of weight updates, without the rendezvous, which `TrainGroup.rendezvous` adds."""
    # Two processes on one GPU cannot share an NCCL group.
    own_devices = transport_named(processes.transport).one_device or cluster.placement == "disaggregated"
    return Address(
        transport=processes.transport,
        engines=tuple(receivers),
        path=str(run_dir / "weights"),
        senders=processes.senders,
        device=processes.device if own_devices else "cpu",
        # Less than the ranks' own: gathering ranks must not give up while the sender waits for an engine.
        timeout=cluster.timeout / 2,
        options=processes.transport_options,
    )


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


def _counted(slots: Mapping[str, Sequence[Slot]]) -> str:
    """For instance "2 actor ranks, 1 critic rank and 2 engines"."""
    counts = [
        f"{len(group)} {'engine' if name == ENGINES else f'{name} rank'}{'s' * (len(group) != 1)}"
        for name, group in slots.items()
    ]
    return " and ".join(filter(None, [", ".join(counts[:-1]), counts[-1]]))


def load_all(
    groups: Mapping[str, TrainGroup],
    fleet: EngineFleet | None,
    progress: Progress,
    *,
    in_turns: bool,
    restarts: int = 0,
) -> dict[str, InitResult]:
    """Start all groups and the engines at once. If they take turns in memory, engines load first and then sleep: an
    engine may size itself by the free memory it finds. Meanwhile ranks do what takes none, so that one that cannot
    start ends the run before the engines have loaded. If a rank dies as it loads, all are restarted, up to `restarts`
    times."""
    starting: dict[str, Future[Any]] = {}
    what = "" if fleet is None else f"{len(fleet)} engine{'s' * (len(fleet) != 1)}"
    if fleet is not None and in_turns:
        progress.begin(f"loading the model into {what}, which will sleep while the ranks load")
        ranks: dict[str, Future[Any]] = {name: group.construct() for name, group in groups.items()}
        begun: dict[str, Any] = wait_all({ENGINES: fleet.start(), **ranks})
        _replace(fleet, begun[ENGINES], progress)
        fleet.sleep()
        progress.begin("loading the model into the ranks")
    elif fleet is not None:
        progress.begin(f"loading the model into the ranks and into {what}")
        starting[ENGINES] = fleet.start()
    else:
        progress.begin("loading the model into the ranks")
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


def _notices(plan: Plan) -> Iterator[str]:
    """What a user may want to know before the first step."""
    yield from plan.start.lost
    yield from plan.notices


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
