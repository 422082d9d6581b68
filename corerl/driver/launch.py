"""From a config to a running `Run`, in processes that all end with it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.calls import Call, together
from corerl.cluster.group import Pending, ProcessGroup, Watching
from corerl.cluster.placement import Seat, seated
from corerl.cluster.process import Outcome
from corerl.cluster.runtime import ray_session
from corerl.config.load import to_plain
from corerl.config.schema import Config
from corerl.data.prompts import PromptStream
from corerl.driver.checkpoints import Checkpoints
from corerl.driver.prepare import Prepared, prepare, title
from corerl.driver.processes import ENGINES
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency, residency_plan
from corerl.driver.roles import Role
from corerl.driver.run import REFERENCE, Run, answers_in, passes_of
from corerl.driver.run_dir import lost_checkpoints, occupied, write_config
from corerl.driver.stop import StopRequest
from corerl.driver.updates import WeightUpdates, meeting_at
from corerl.errors import EngineFailed, SaveFailed
from corerl.messages import one_line
from corerl.plugin import hooktrace
from corerl.plugin.events import RunFinished, RunStarted, Worked
from corerl.plugin.observers import load_observers, traced
from corerl.plugin.options import merge_environments, notes
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Kind
from corerl.rollout.asynchronous import Asynchronous
from corerl.rollout.engine import EngineContext
from corerl.rollout.episodes import EpisodeScorer
from corerl.rollout.fleet import EngineFleet
from corerl.rollout.front import Front
from corerl.rollout.one_step_off import OneStepOff
from corerl.rollout.play import EpisodeSampler
from corerl.rollout.postprocess import Postprocessed
from corerl.rollout.reward_pool import scorer
from corerl.rollout.rewards import InTurn, Scorer
from corerl.rollout.sampler import Sampler
from corerl.rollout.saved import ROLLOUTS, Kept, SavedRollouts
from corerl.rollout.service import EngineAssignment
from corerl.rollout.sources import Draws, Refill, Source, Synchronous
from corerl.trainer.assign import ACTOR, RolePlan, loss_of, offloaded
from corerl.trainer.group import TrainGroup
from corerl.types import InitResult
from corerl.weights.transport import Address
from corerl.weights.transports import TRANSPORTS

SEATED_WITHIN = 60.0  # seconds that a cluster has to free what a run asks for


@contextlib.contextmanager
def launch(config: Config) -> Iterator[Run]:
    """Start the processes of a run; however the block ends, none of them is left. Errors are told to the observers."""
    prepared = prepare(config)
    with occupied(prepared.run_dir):
        yield from _launched(prepared)


def _launched(prepared: Prepared) -> Iterator[Run]:
    config = prepared.config
    write_config(prepared.run_dir, config)
    progress = Progress(load_observers(config.extensions, str(prepared.run_dir)), prepared.first_step)
    started = time.perf_counter()
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
        for text in [*lost_checkpoints(config, prepared.run_dir), *notes(config), *missing_answers(prepared)]:
            progress.notice(text)
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopRequest(progress.notice))
            run = _start(prepared, progress, stop, stack)
            with _rescuing(run):
                yield run
            run.source.close()
            for role in run.roles.values():
                role.group.shutdown("finished")
            if run.updates is not None:
                run.updates.fleet.close()
    except BaseException:
        progress.tell(
            RunFinished(
                reason="failed",
                steps_done=progress.step,
                seconds=time.perf_counter() - started,
                artifacts={"run directory": str(prepared.run_dir)},
            )
        )
        progress.observers.shutdown("failed")
        raise
    progress.observers.shutdown("finished")


@contextlib.contextmanager
def _rescuing(run: Run) -> Iterator[None]:
    """A block whose failure does not cost a checkpoint that was being written in the background."""
    try:
        yield
    except SaveFailed:
        raise  # what was being written is what failed
    except Exception:  # a second signal is none: it stops at once and saves nothing
        try:
            run.checkpoints.rescue()
        except Exception as error:
            run.progress.notice(f"the checkpoint that was being written is lost: {one_line(error)}")
        raise


def _start(prepared: Prepared, progress: Progress, stop: StopRequest, stack: contextlib.ExitStack) -> Run:
    config, state = prepared.config, prepared.state
    reward = _scorer(prepared, stack)  # first: its processes start while Ray does
    groups, fleet, inits = _start_processes(prepared, progress, stack)
    roles = {name: make_role(plan, config, groups[name], inits[name]) for name, plan in prepared.plan.roles.items()}
    if config.algorithm.kl_coef and config.run.trains:
        groups[ACTOR].snapshot(REFERENCE).load()
    source, sampler = _start_source(prepared, fleet, reward, stack)
    sharing = offloaded(config, prepared.device)
    residency = Residency(
        plan=residency_plan(sharing, passed={each.role for each in passes_of(config)}),
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
            manifest=groups[ACTOR].manifest(),
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
        run_dir=prepared.run_dir,
        progress=progress,
        stop=stop,
        roles=roles,
        updates=updates,
        residency=residency,
        source=source,
        sampler=sampler,
        reward=reward,
        params=prepared.params,
        held_out=prepared.prompts.held_out_prompts(),
        checkpoints=checkpoints,
        kl_coef=state.get("kl_coef", own) if config.algorithm.kl_target else own,
        before=answers_in(state),
    )
    if fleet is not None:
        fleet.on_lost = run.bring_weights
        progress.begin("sending the first weights")
    return run


def _scorer(prepared: Prepared, stack: contextlib.ExitStack) -> Scorer:
    """What scores samples: in processes of its own where any are drawn."""
    config = prepared.config
    if not config.run.samples:
        return prepared.reward
    # The source may score in a thread of its own while the loop evaluates.
    reward: Scorer = InTurn(stack.enter_context(scorer(prepared.reward, config.reward)))
    if prepared.function is not None:
        reward = EpisodeScorer(reward, failed_value=config.reward.failed_value)
    return reward


def _start_processes(
    prepared: Prepared, progress: Progress, stack: contextlib.ExitStack
) -> tuple[dict[str, TrainGroup], EngineFleet | None, dict[str, InitResult]]:
    """The ranks of each role and the engines, all of them ready; `stack` ends them."""
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
    return groups, fleet, _init(groups, fleet, in_turns=bool(offloaded(config, prepared.device)))


def _start_source(
    prepared: Prepared, fleet: EngineFleet | None, reward: Scorer, stack: contextlib.ExitStack
) -> tuple[Source, Sampler | None]:
    """Of the run's batches, where a resumed run's stands; and what samples in the loop's thread, if anything does."""
    config, state = prepared.config, prepared.state
    sampler: Sampler | None = None
    aside: Sampler | None = None
    if fleet is not None:
        front: Front | None = None
        if prepared.function is not None:
            front = Front(temperature=config.rollout.temperature, top_p=config.rollout.top_p)
            stack.callback(front.close)
        sampler = make_sampler(prepared, fleet, front)
        aside = make_sampler(prepared, fleet, front, aside=True)
    source = make_source(prepared, fleet, sampler, aside, reward)
    stack.callback(source.close)
    if state and config.run.trains:
        source.restore(state["source"], prepared.resume)
    return source, sampler


def address_of(prepared: Prepared, fleet: EngineFleet) -> Address:
    """Where ranks and engines meet for updates; the place itself is `meeting_at`'s."""
    config = prepared.config
    return Address(
        transport=prepared.plan.transport,
        engines=fleet.receivers,
        path=str(prepared.run_dir / "weights"),
        senders=prepared.plan.senders,
        # Two processes on one GPU cannot be in one group of NCCL's.
        device=prepared.device
        if TRANSPORTS[prepared.plan.transport].one_device or config.cluster.placement == "disaggregated"
        else "cpu",
        # Less than the ranks' own: those that gather must not give up while the sender waits for an engine.
        timeout=config.cluster.timeout / 2,
    )


def tell_of(progress: Progress, process: str, pending: Pending, outcome: Outcome) -> None:
    """Of a call that `process` has answered."""
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


def make_sampler(prepared: Prepared, fleet: EngineFleet, front: Front | None, *, aside: bool = False) -> Sampler:
    """Of single responses, or of the episodes that the run's function plays at `front`. `aside`: for a thread that does
    not update weights."""
    generate = fleet.generate_aside if aside else fleet.generate
    seed, tokenizer = prepared.config.run.seed, prepared.tokenizer
    if prepared.function is None or front is None:
        return Sampler(tokenizer=tokenizer, generate=generate, seed=seed)
    return EpisodeSampler(
        tokenizer=tokenizer,
        generate=generate,
        seed=seed,
        function=prepared.function,
        front=front,
        config=prepared.config.rollout.episodes,
        aside=fleet.generate_aside,
        calls=calls_of(prepared),
    )


def make_source(
    prepared: Prepared, fleet: EngineFleet | None, sampler: Sampler | None, aside: Sampler | None, reward: Scorer
) -> Source:
    """Of the run's batches: sampled, or read; `aside` in the background."""
    config = prepared.config
    rollout, steps = config.rollout, config.run.steps
    source: Source
    if fleet is None or sampler is None or aside is None:
        source = SavedRollouts(rollout.saved, steps=steps, vocab_size=prepared.vocab_size)
    else:
        attempts = config.algorithm.dynamic_sampling
        draws = Draws(
            stream=PromptStream(prepared.prompts, config.run.seed),
            sampler=sampler,
            reward=reward,
            params=prepared.params,
            prompts=rollout.prompts,
            samples=rollout.samples,
            refill=Refill(useful=spread, attempts=attempts) if attempts else None,
        )
        match rollout.source:
            case "synchronous":
                source = Synchronous(draws, steps=steps)
            case "one-step-off":
                source = OneStepOff(draws, evolve(draws, sampler=aside), steps=steps)
            case "asynchronous":
                source = Asynchronous(
                    draws, fleet, steps=steps, max_staleness=rollout.max_staleness, calls=calls_of(prepared)
                )
    if config.rollout.save or config.run.mode == "rollout-only":
        source = Kept(source, prepared.run_dir / ROLLOUTS)
    if prepared.postprocess is not None:
        source = Postprocessed(source, prepared.postprocess, config.rollout.postprocess)
    return source


def _counted(seats: Mapping[str, Sequence[Seat]]) -> str:
    """Such as "2 actor ranks, 1 critic rank and 2 engines"."""
    counts = [
        f"{len(group)} {'engine' if name == ENGINES else f'{name} rank'}{'s' * (len(group) != 1)}"
        for name, group in seats.items()
    ]
    return " and ".join(filter(None, [", ".join(counts[:-1]), counts[-1]]))


def _init(groups: Mapping[str, TrainGroup], fleet: EngineFleet | None, *, in_turns: bool) -> dict[str, InitResult]:
    """All groups and the engines start at the same time; but where they take turns in memory the engines are first, and
    sleep: an engine may measure what memory is free, and take the most of it."""
    calls: dict[str, Call[Any]] = {}
    if fleet is not None and in_turns:
        fleet.start()
        fleet.sleep()
    elif fleet is not None:
        calls[ENGINES] = fleet.start_async()
    calls |= {name: group.init_async() for name, group in groups.items()}
    results = together(calls)
    return {name: results[name] for name in groups}


def make_role(plan: RolePlan, config: Config, group: TrainGroup, init: InitResult) -> Role:
    return Role(
        name=plan.role,
        group=group,
        loss=loss_of(plan.role, config),
        train=config.train_of(plan.role),
        # A value is worth as much at any token; what a policy's token weighs is the algorithm's choice.
        aggregation=config.algorithm.aggregation if plan.role == ACTOR else "token-mean",
        max_tokens=config.rollout.max_tokens,
        seed=config.run.seed,
        first_step=config.algorithm.critic.warmup_steps if plan.role == ACTOR else 0,
        rollout_steps=config.run.steps,
        optimizer_step=init.optimizer_step,
    )


def missing_answers(prepared: Prepared, looked_at: int = 100) -> list[str]:
    """One line where the first prompts have no answers: rewards that compare with one would be 0 without a word."""
    config, prompts = prepared.config, prepared.prompts
    found = [prompts.prompt(index) for index in prompts.train[:looked_at].tolist()]
    if not config.run.samples or any(prompt.answer for prompt in found):
        return []
    has = ", ".join(found[0].fields) or "nothing"
    line = f"data.answer_key: none of the first {len(found)} prompts has an answer under {config.data.answer_key!r}"
    return [f"{line}; the first one has: {has}"]


def process_environment(prepared: Prepared) -> dict[str, str]:
    """What every process of a run is given before it imports anything."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # A loss or a backend of the user's own, 'module:name', is found where the driver finds it.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    if hooktrace.wanted():
        environment[hooktrace.VARIABLE] = os.environ[hooktrace.VARIABLE]
    if prepared.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # one core a process: more threads than cores fight each other
        if not prepared.config.cluster.address:
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: no other interface need be up, or trusted
    elif TRANSPORTS[prepared.plan.transport].joins and prepared.config.cluster.placement == "disaggregated":
        # Ranks and engines are in one group of NCCL's, which must be set alike in all; engines switch these off.
        environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return environment


def environment_of(prepared: Prepared, plugin: str, wanted: Mapping[str, str]) -> dict[str, str]:
    """Of the processes of one plugin: what the user gives stands in the place of what a run gives by itself.

    Raises ConfigError where the plugin wants another value."""
    user = prepared.config.cluster.environment
    own = {name: value for name, value in process_environment(prepared).items() if name not in user}
    return merge_environments(("corerl", own), ("cluster.environment", user), (plugin, wanted))


def calls_of(prepared: Prepared) -> int:
    """Calls of `generate` that one engine of the run answers side by side."""
    return prepared.plan.engine.spec.calls(prepared.config.engines[prepared.plan.engine.name], prepared.plan.engines)


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
    processes = ProcessGroup(
        names,
        "corerl.rollout.service:EngineService",
        seats,
        environment,
        failure=EngineFailed,
        threads=calls_of(prepared) + 2,  # beside what is sampled for training an evaluation, and `pause`
        watching=watching,
    )
    return EngineFleet(processes, assignments, restarts=config.rollout.restarts)
