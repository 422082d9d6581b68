"""Turn a config into a running `Run`, in processes that all end with it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.algorithms.base import Objective
from corerl.calls import Future, wait_all
from corerl.checkpoint.commit import latest
from corerl.cluster.group import Pending, RayGroup, Watching
from corerl.cluster.placement import Seat, seated
from corerl.cluster.process import Outcome
from corerl.cluster.runtime import ray_session
from corerl.config.load import recorded, to_plain
from corerl.config.schema import Config
from corerl.data.prompts import PromptStream
from corerl.driver.algorithm import REFERENCE, told_sampling
from corerl.driver.checkpoints import Checkpoints
from corerl.driver.environment import environment_of
from corerl.driver.gate import PROMPTS, Gate, bound_of, draw
from corerl.driver.prepare import Prepared, prepare, title, told_answers, told_layouts, told_memory
from corerl.driver.processes import ENGINES
from corerl.driver.progress import BEAT_SECONDS, CHECKED, Progress
from corerl.driver.residency import Residency, residency_plan
from corerl.driver.roles import Role, changed_rates
from corerl.driver.run import Run, answers_in
from corerl.driver.run_dir import changed_settings, occupied, skipping, write_config
from corerl.driver.sampling import calls_of, start_scorer, start_source, unseen_tokens
from corerl.driver.stop import StopRequest
from corerl.driver.updates import WeightUpdates, meeting_at
from corerl.errors import CheckpointDamaged, EngineFailed, SaveFailed
from corerl.messages import one_line
from corerl.plugin import hooktrace
from corerl.plugin.events import RunFinished, RunStarted, Worked
from corerl.plugin.observers import load_observers, traced
from corerl.plugin.options import notes
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Kind
from corerl.plugin.spec import ACTOR
from corerl.rollout import templates
from corerl.rollout.engine import EngineContext
from corerl.rollout.fleet import EngineFleet
from corerl.rollout.sampler import Sampler
from corerl.rollout.service import EngineAssignment
from corerl.trainer.assign import RolePlan, offloaded
from corerl.trainer.group import TrainGroup
from corerl.types import InitResult, SampleBatch
from corerl.weights.transport import Address
from corerl.weights.transports import TRANSPORTS

SEATED_WITHIN = 60.0  # seconds for a cluster to free what a run asks for


@contextlib.contextmanager
def launch(config: Config) -> Iterator[Run]:
    """Start a run's processes; none survives the block, however it ends. Observers are told of errors.

    With `checkpoint.resume = "auto"`, a checkpoint that its ranks find to be damaged is passed over for an older one,
    and the run is started anew."""
    began = time.monotonic()
    damaged: dict[Path, str] = {}
    told: set[str] = set()
    with contextlib.ExitStack() as stack:
        while True:
            prepared = prepare(config, damaged=damaged)
            prepared = evolve(prepared, lost=tuple(line for line in prepared.lost if line not in told))
            told.update(prepared.lost)
            try:
                run = stack.enter_context(_launched(prepared, damaged, began))
            except CheckpointDamaged:
                if prepared.resume not in damaged:
                    raise
                told.add(skipping(prepared.resume, damaged[prepared.resume]))
            else:
                break
        yield run


@contextlib.contextmanager
def _launched(prepared: Prepared, damaged: dict[Path, str], began: float) -> Iterator[Run]:
    with occupied(prepared.run_dir):
        yield from _started(prepared, damaged, began)


def _started(prepared: Prepared, damaged: dict[Path, str], began: float) -> Iterator[Run]:
    """The run, once it has started; `began` is when it was launched. If ranks find its checkpoint to be damaged, and it
    may fall back to another, the checkpoint is added to `damaged` before that is raised."""
    config = prepared.config
    write_config(prepared.run_dir, config)
    progress = Progress(
        load_observers(config.extensions, str(prepared.run_dir)),
        prepared.first_step,
        watchdog=config.cluster.watchdog,
        began=began,
    )
    try:
        progress.tell(
            RunStarted(
                run_dir=str(prepared.run_dir),
                steps=config.run.steps,
                first_step=progress.step,
                title=title(prepared),
                mode=config.run.mode,
                same_run=prepared.same_run,
            )
        )
        for text in _notices(prepared):
            progress.notice(text)
        with contextlib.ExitStack() as stack:
            stack.callback(templates.SHARED.close)
            stack.enter_context(progress.beating())
            stop = stack.enter_context(StopRequest(progress.notice, config.run.mode))
            try:
                run = _start(prepared, progress, stop, stack)
            except CheckpointDamaged as error:
                if prepared.resume is not None and config.checkpoint.resume == "auto":
                    damaged[prepared.resume] = error.message
                raise
            with _rescuing(run):
                yield run
            run.source.close()
            for role in run.roles.values():
                role.group.shutdown("finished")
            if run.updates is not None:
                run.updates.fleet.close()
    except BaseException as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        lost = prepared.resume if isinstance(error, CheckpointDamaged) else None
        if lost is not None and lost in damaged and latest(prepared.run_dir, damaged=damaged) is not None:
            progress.notice(skipping(lost, damaged[lost]))  # before the checks of the next start
            progress.observers.shutdown("restarted")
            raise
        progress.tell(
            RunFinished(
                reason=reason,
                steps_done=progress.step,
                seconds=progress.elapsed,
                artifacts={"run directory": str(prepared.run_dir)},
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
    except Exception:  # not a second signal (KeyboardInterrupt): that stops at once and saves nothing
        try:
            run.checkpoints.rescue()
        except Exception as error:
            run.progress.notice(f"the checkpoint being written is lost: {one_line(error)}")
        raise


def _start(prepared: Prepared, progress: Progress, stop: StopRequest, stack: contextlib.ExitStack) -> Run:
    config, state = prepared.config, prepared.state
    check = prepared.check if prepared.check is not None and prepared.check.notices is None else None
    if check is not None:
        check.begin()
        stack.callback(check.stop)
    reward = start_scorer(prepared, progress, stack)  # first: its processes start while Ray does
    groups, fleet, inits = _start_processes(
        prepared, progress, stack, beside=check.future if check is not None else None
    )
    objectives = prepared.algorithm.objectives
    roles = {
        name: make_role(plan, config, objectives[name], groups[name], inits[name])
        for name, plan in prepared.plan.roles.items()
    }
    if state and config.run.trains:
        for text in changed_rates(state["config"], roles.values()):
            progress.notice(text)
    if config.run.trains and any(each.weights == REFERENCE for each in prepared.algorithm.passes):
        reference, every = groups[ACTOR].snapshot(REFERENCE), config.algorithm.reference_every
        if state and every:
            reference.create().result()  # from the checkpoint's weights, which are the reference at every such step
            if late := progress.step % every:
                progress.notice(
                    f"the reference policy is the actor of step {progress.step}, not of step {progress.step - late}, "
                    "whose weights no checkpoint has"
                )
        else:
            reference.load(config.algorithm.reference).result()
    if check is not None:
        progress.begin("checking the prompts")
        while not check.ready(BEAT_SECONDS):
            progress.count(CHECKED, check.done, check.of)
        for text in check.finish():
            progress.notice(text)
    source, sampler = start_source(prepared, fleet, reward, progress, stack)
    sharing = offloaded(config, prepared.device)
    residency = Residency(
        plan=residency_plan(sharing, passed={each.role for each in prepared.algorithm.passes}),
        groups={name: groups[name] for name in sharing},
        fleet=fleet,
        progress=progress,
    )
    updates: WeightUpdates | None = None
    if fleet is not None:
        updates = WeightUpdates(
            config=config.weights,
            group=groups[ACTOR],
            fleet=fleet,
            source=source,
            manifest=groups[ACTOR].manifest().result(),
            address=meeting_at(address_of(prepared, fleet), groups[ACTOR]),
            version=inits[ACTOR].weights_version,
            residency=residency,
            progress=progress,
        )
    checkpoints = Checkpoints(
        run_dir=prepared.run_dir,
        config=config.checkpoint,
        roles=roles,
        newest=prepared.resume,
        last_step=progress.step if state else -1,
        progress=progress,
    )
    own = config.algorithm.kl_coef
    run = Run(
        config=config,
        algorithm=prepared.algorithm,
        run_dir=prepared.run_dir,
        progress=progress,
        stop=stop,
        roles=roles,
        updates=updates,
        gate=make_gate(prepared, fleet, sampler, progress),
        residency=residency,
        source=source,
        sampler=sampler,
        reward=reward,
        params=prepared.params,
        held_out=prepared.prompts.held_out_prompts(),
        checkpoints=checkpoints,
        kl_coef=state.get("kl_coef", own) if config.algorithm.kl_target else own,
        before=answers_in(state) if config.run.trains else (),
        unseen=unseen_tokens(prepared),
    )
    if fleet is not None:
        fleet.on_lost = run.bring_weights
        progress.begin("sending the first weights")
    return run


def make_gate(
    prepared: Prepared, fleet: EngineFleet | None, sampler: Sampler | None, progress: Progress
) -> Gate | None:
    """The gate of a run whose samples are to be trained on, unless it is switched off."""
    config = prepared.config
    if fleet is None or sampler is None or config.run.mode == "eval" or config.algorithm.on_mismatch == "off":
        return None

    def drawn() -> SampleBatch:
        # A stream of its own, so that the run's stays where it is.
        prompts = PromptStream(prepared.prompts, config.run.seed).take(PROMPTS)
        return draw(prompts, sampler=sampler, generate=fleet.generate, params=prepared.params)

    return Gate(
        bound=bound_of(config.algorithm, train=config.train_of(ACTOR), weights=config.weights),
        stops=config.algorithm.on_mismatch == "stop",
        every=config.weights.verify_every,
        draw=drawn,
        run_dir=prepared.run_dir,
        progress=progress,
    )


def _start_processes(
    prepared: Prepared, progress: Progress, stack: contextlib.ExitStack, *, beside: Future[Any] | None
) -> tuple[dict[str, TrainGroup], EngineFleet | None, dict[str, InitResult]]:
    """Start the ranks of each role and the engines; returns when all are ready, or raises the error of a future
    `beside`. `stack` ends them."""
    config, plan = prepared.config, prepared.plan
    progress.begin("starting Ray")
    session = ray_session(address=config.cluster.address, cpus=plan.seating.cpus, forward=hooktrace.wanted())
    stack.enter_context(session)
    seats = stack.enter_context(seated(plan.seating, timeout=SEATED_WITHIN))
    progress.begin(f"starting {_counted(seats)}")
    watching = Watching(
        notify=progress.notice,
        seconds=config.cluster.watchdog,
        on_answer=functools.partial(tell_of, progress) if traced(config.extensions) else None,
    )
    groups: dict[str, TrainGroup] = {}
    for name, role in plan.roles.items():
        environment = environment_of(prepared, role.backend.name, role.environment)
        groups[name] = TrainGroup.launch(role, seats[name], environment, watching=watching)
        stack.callback(groups[name].processes.kill)
    fleet: EngineFleet | None = None
    if config.run.samples:
        fleet = make_fleet(prepared, seats[ENGINES], watching)
        stack.callback(fleet.processes.kill)
    in_turns = bool(offloaded(config, prepared.device))
    return groups, fleet, start_all(groups, fleet, progress, in_turns=in_turns, beside=beside)


def address_of(prepared: Prepared, fleet: EngineFleet) -> Address:
    """The address of weight updates, without the meeting point, which `meeting_at` adds."""
    config = prepared.config
    return Address(
        transport=prepared.plan.transport,
        engines=fleet.receivers,
        path=str(prepared.run_dir / "weights"),
        senders=prepared.plan.senders,
        # Two processes on one GPU cannot share an NCCL group.
        device=prepared.device
        if TRANSPORTS[prepared.plan.transport].one_device or config.cluster.placement == "disaggregated"
        else "cpu",
        # Less than the ranks' own: gathering ranks must not give up while the sender waits for an engine.
        timeout=config.cluster.timeout / 2,
    )


def tell_of(progress: Progress, process: str, pending: Pending, outcome: Outcome) -> None:
    """Report a call that `process` has answered."""
    progress.tell(
        Worked(
            process=process,
            verb=outcome.method,
            call=pending.method,
            asked=pending.asked,
            started=outcome.started,
            ended=outcome.ended,
            lane=outcome.lane,
            error=outcome.error.message if outcome.error else "",
            spans=outcome.spans,
            waits=outcome.waits,
        )
    )


def _counted(seats: Mapping[str, Sequence[Seat]]) -> str:
    """For instance "2 actor ranks, 1 critic rank and 2 engines"."""
    counts = [
        f"{len(group)} {'engine' if name == ENGINES else f'{name} rank'}{'s' * (len(group) != 1)}"
        for name, group in seats.items()
    ]
    return " and ".join(filter(None, [", ".join(counts[:-1]), counts[-1]]))


def start_all(
    groups: Mapping[str, TrainGroup],
    fleet: EngineFleet | None,
    progress: Progress,
    *,
    in_turns: bool,
    beside: Future[Any] | None = None,
) -> dict[str, InitResult]:
    """Start all groups and the engines at once. If they take turns in memory, engines load first and then sleep: an
    engine may size itself by the free memory it finds. Meanwhile ranks do what takes none, so that one that cannot
    start ends the run before the engines have loaded. The error of a future `beside` ends the start too."""
    starting: dict[str, Future[Any]] = {}
    what = "" if fleet is None else f"{len(fleet)} engine{'s' * (len(fleet) != 1)}"
    if fleet is not None and in_turns:
        progress.begin(f"loading the model into {what}, which will sleep while the ranks load")
        ranks = {name: group.construct() for name, group in groups.items()}
        wait_all({ENGINES: fleet.start(), **ranks}, beside=beside)
        fleet.sleep()
        progress.begin("loading the model into the ranks")
    elif fleet is not None:
        progress.begin(f"loading the model into the ranks and into {what}")
        starting[ENGINES] = fleet.start()
    else:
        progress.begin("loading the model into the ranks")
    starting |= {name: group.init() for name, group in groups.items()}
    results = wait_all(starting, beside=beside)
    return {name: results[name] for name in groups}


def make_role(plan: RolePlan, config: Config, objective: Objective, group: TrainGroup, init: InitResult) -> Role:
    return Role(
        name=plan.role,
        group=group,
        loss=objective.loss,
        train=config.train_of(plan.role),
        aggregation=objective.aggregation,
        max_tokens=config.rollout.max_tokens,
        seed=config.run.seed,
        first_step=objective.first_step,
        rollout_steps=config.train_of(plan.role).schedule.steps or config.run.steps,
        optimizer_step=init.optimizer_step,
    )


def _notices(prepared: Prepared) -> Iterator[str]:
    """What a user may want to know before the first step."""
    config, state = prepared.config, prepared.state
    yield from prepared.lost
    if state and config.run.trains:
        yield from changed_settings(state["config"], to_plain(recorded(config)))
    yield from notes(config)
    yield from told_answers(prepared)
    if prepared.check is not None:
        yield from prepared.check.notices or ()  # of one that goes on, when it has ended
    yield from prepared.notices
    yield from told_sampling(config)
    if config.run.trains:
        yield from told_layouts(prepared)
        yield from told_memory(prepared, fullest=True)
    yield from prepared.settled


def make_fleet(prepared: Prepared, seats: list[Seat], watching: Watching) -> EngineFleet:
    config, engine = prepared.config, prepared.plan.engine
    options = config.engines[engine.name]
    assignments = [
        EngineAssignment(
            engine=config.rollout.engine,
            origins=origins_of((Kind.ENGINES, engine)),
            model=config.model,
            options=to_plain(options),
            context=EngineContext(
                name=f"engine-{index}",
                index=index,
                device=prepared.device,
                precision=config.train_of(ACTOR).precision,
                context_length=prepared.context_length,
                bundles=prepared.plan.seating.widths.get(ENGINES, 1),
                devices=seat.devices,
                run_dir=str(prepared.run_dir),
                weights=config.weights,
            ),
        )
        for index, seat in enumerate(seats)
    ]
    environment = environment_of(prepared, engine.name, engine.spec.environment(options, prepared.plan.engines))
    names = [assignment.context.name for assignment in assignments]
    processes = RayGroup(
        names,
        "corerl.rollout.service:EngineService",
        seats,
        environment,
        failure=EngineFailed,
        threads=calls_of(prepared) + 2,  # besides sampling for training: an evaluation, and `pause`
        watching=watching,
    )
    return EngineFleet(processes, assignments, restarts=config.rollout.restarts)
