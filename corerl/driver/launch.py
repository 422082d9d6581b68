"""Turn a config into a running `Run`, in processes that all end with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial

from corerl.algorithms.base import REFERENCE
from corerl.driver.checkpoints import Checkpoints, MemoryCheckpoints, Saves
from corerl.driver.engines import Engines
from corerl.driver.groups import RunGroups
from corerl.driver.logprob_check import LogprobCheck
from corerl.driver.metrics import StepNotices, StepReports, unseen_tokens
from corerl.driver.processes import start_processes
from corerl.driver.progress import Progress, StopRequest
from corerl.driver.rank_recovery import RankRecovery
from corerl.driver.residency import Residency
from corerl.driver.roles import ReferencePolicy, roles_of
from corerl.driver.run import Run
from corerl.driver.run_dir import occupied, write_config
from corerl.driver.sampling import Evaluations, Sampling, start_rewards
from corerl.errors import CheckpointDamaged, SaveFailed, WorkerDied
from corerl.event_loop import EventLoop
from corerl.messages import one_line
from corerl.observability.jsonl import NoticeFile
from corerl.plan.plan import Plan
from corerl.plugin.events import RunFinished, RunStarted
from corerl.plugin.observers import load_observers, traced
from corerl.plugin.spec import ACTOR


@contextlib.contextmanager
def launch(plan: Plan, *, began: float | None = None) -> Iterator[Run]:
    """Start a run's processes; none survives the block, however it ends. Observers get errors. `began` is when the run
    was launched, by `time.monotonic()`, if that was before its plan was made."""
    start, began = plan.start, time.monotonic() if began is None else began
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
                stop = stack.enter_context(StopRequest(progress.notice_later))
                run = _assemble(plan, progress, stop, stack)
                with _rescuing(run):
                    yield run
                _close(run)
        except BaseException as error:
            damaged = start.resume if isinstance(error, CheckpointDamaged) else None
            if damaged is not None and damaged.is_relative_to(start.run_dir):  # of another run, any other may be named
                error.add_note(f"to resume from the checkpoint before it, remove {damaged}")
            _end_observers(progress, str(start.run_dir), error)
            raise
        observers.shutdown("finished")


def _end_observers(progress: Progress, run_dir: str, error: BaseException) -> None:
    """Let observers know that the run has failed."""
    if isinstance(error, WorkerDied):  # calls of engines do not say at which step they are
        error.add_note(f"the run ended in step {progress.steps_done}")
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    progress.emit(
        RunFinished(
            reason=reason,
            steps_done=progress.steps_done,
            seconds=progress.elapsed,
            artifacts={"run directory": run_dir},
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
    if run.engines is not None:
        run.engines.fleet.close()


def _assemble(plan: Plan, progress: Progress, stop: StopRequest, stack: contextlib.ExitStack) -> Run:
    start, trains = plan.start, plan.run.trains
    loop = EventLoop("rollout")
    stack.callback(loop.close)
    rewards = start_rewards(plan, loop, progress, stack)  # first: their processes start while Ray does
    started = start_processes(
        plan.processes, plan.cluster, plan.rollout.settings, loop, progress, stack, traces=traced(plan.extensions)
    )
    actor, fleet = started.train_groups[ACTOR], started.fleet
    roles = roles_of(plan, started.train_groups, notify=progress.notice)
    trained = {name: role for name, role in roles.items() if role.loss is not None}
    asked = trains and REFERENCE in plan.algorithm.snapshots(ACTOR)
    reference = ReferencePolicy(group=actor, asked=asked, settings=plan.algorithm.settings, progress=progress)
    reference.begin(resumed=bool(start.state))
    sampling = Sampling(plan=plan, fleet=fleet, loop=loop, rewards=rewards, progress=progress, stack=stack)
    residency = Residency.of(
        plan.processes,
        started.train_groups,
        fleet,
        progress,
        passed={each.role for each in plan.algorithm.passes},
        measures=plan.cluster.offload == "auto",
    )
    groups = RunGroups(
        plan=plan, pool=started.pool, roles=roles, fleet=fleet, residency=residency, progress=progress, stop=stop
    )
    engines = None
    if fleet is not None:
        engines = Engines(
            config=plan.weights,
            group=actor,
            fleet=fleet,
            address_of=groups.update_address,
            separate_adapters=plan.processes.separate_adapters,
            residency=residency,
            on_death=partial(groups.failed, ranks=False),
            progress=progress,
        )
    checkpoints = Checkpoints(
        run_dir=start.run_dir,
        config=plan.checkpoint,
        roles=trained,
        residency=residency,
        newest=start.resume,
        last_step=progress.steps_done if start.state else -1,
        progress=progress,
    )
    in_memory = plan.checkpoint.memory and trains
    memory = stack.enter_context(MemoryCheckpoints.of_run(checkpoints)) if in_memory else None
    saves = Saves(disk=checkpoints, memory=memory)
    run = Run(
        plan=plan,
        progress=progress,
        roles=roles,
        engines=engines,
        reference=reference,
        logprob_check=LogprobCheck.of(plan, sampling.sampler, progress),
        residency=residency,
        sampling=sampling,
        evaluations=Evaluations(plan=plan, sampling=sampling, progress=progress),
        saves=saves,
        recovery=RankRecovery(groups=groups, engines=engines, saves=saves, start=start, trains=trains),
        groups=groups,
        reports=StepReports(
            recomputes=plan.algorithm.settings.old_logprobs == "recompute",
            roles=roles,
            fleet=fleet,
            residency=residency,
            progress=progress,
            notices=StepNotices(
                unseen=unseen_tokens(plan.rollout) if plan.run.has_engines else {}, sampled=plan.run.has_engines
            ),
            placeholder=None if plan.rollout.pictures is None else plan.rollout.pictures.placeholder,
        ),
    )
    if fleet is not None:
        progress.begin("sending the first weights")
    return run
