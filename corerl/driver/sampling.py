"""Assemble what produces a run's batches: sampler, scorer and source."""

from __future__ import annotations

import contextlib
from functools import partial

from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.data.prompts import PromptStream
from corerl.driver.progress import DRAWN, SCORED, Progress
from corerl.engines.fleet import Counted, EngineFleet
from corerl.event_loop import EventLoop
from corerl.models.tokenizer import special_tokens
from corerl.plan.plan import Plan, RolloutPlan
from corerl.rollout.agents.chat_server import ChatServer
from corerl.rollout.agents.episodes import EpisodeScorer
from corerl.rollout.agents.play import EpisodeSampler
from corerl.rollout.postprocess import Postprocessed
from corerl.rollout.rewards.base import InTurn, Scorer
from corerl.rollout.rewards.pool import scorer
from corerl.rollout.sampler import Sampler
from corerl.rollout.sources.asynchronous import Asynchronous
from corerl.rollout.sources.base import BatchSampler, DynamicSampling, Source, Synchronous
from corerl.rollout.sources.one_step_off import OneStepOff
from corerl.rollout.sources.recorded import ROLLOUTS, RecordingSource, SavedRollouts


def start_scorer(plan: RolloutPlan, progress: Progress, stack: contextlib.ExitStack, *, samples: bool) -> Scorer:
    """The run's scorer; it uses processes of its own if the run `samples`."""
    if not samples:
        return plan.reward
    # The source may score in its own thread while the loop evaluates.
    pool = scorer(plan.reward, plan.rewarding, partial(progress.count, SCORED))
    reward: Scorer = InTurn(stack.enter_context(pool))
    if plan.function is not None:
        reward = EpisodeScorer(reward, failed_value=plan.rewarding.failed_value)
    return reward


def start_source(
    plan: Plan, fleet: EngineFleet | None, reward: Scorer, progress: Progress, stack: contextlib.ExitStack
) -> tuple[Source, Sampler | None]:
    """The source, restored if the run resumes, and the sampler for the loop's thread, if the run samples."""
    rollout, engine, start = plan.rollout, plan.processes.engine, plan.start
    told = partial(progress.count, DRAWN)
    sampler: Sampler | None = None
    source: Source
    if fleet is None or engine is None:
        source = SavedRollouts(rollout.settings.saved, steps=plan.run.steps, vocab_size=rollout.vocab_size)
    else:
        front: ChatServer | None = None
        if rollout.function is not None:
            settings = rollout.settings
            loop = EventLoop("rollouts")
            stack.callback(loop.close)
            front = ChatServer(loop, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
            stack.callback(front.close)
        sampler = make_sampler(rollout, fleet, front, told, calls=engine.calls)
        aside = make_sampler(rollout, fleet, front, told, calls=engine.calls, aside=True)
        source = make_source(rollout, fleet, sampler, aside, reward, told, calls=engine.calls, steps=plan.run.steps)
    if rollout.settings.save or plan.run.mode == "rollout-only":
        source = RecordingSource(source, start.run_dir / ROLLOUTS)
    if rollout.postprocess is not None:
        source = Postprocessed(source, rollout.postprocess, rollout.settings.postprocess)
    stack.callback(source.close)
    if start.state and plan.run.trains:
        source.restore(start.state["source"], start.resume)
    return source, sampler


def make_sampler(
    plan: RolloutPlan, fleet: EngineFleet, front: ChatServer | None, told: Counted, *, calls: int, aside: bool = False
) -> Sampler:
    """A sampler of single responses, or of the episodes that the run's function plays through `front`, with at most
    `calls` at a time in each engine. `told` hears how many samples are drawn. `aside`: for a thread that does not
    update weights."""
    generate = fleet.generate_aside if aside else fleet.generate
    if plan.function is None or front is None:
        return Sampler(
            tokenizer=plan.tokenizer,
            generate=partial(generate, told=told),
            seed=plan.seed,
            template_options=plan.template_options,
            special_tokens=plan.rewarding.special_tokens,
        )
    return EpisodeSampler(
        tokenizer=plan.tokenizer,
        generate=generate,
        seed=plan.seed,
        function=plan.function,
        front=front,
        config=plan.settings.episodes,
        aside=fleet.generate_aside,
        calls=calls,
        longest_prompt=plan.longest_prompt,
        template_options=plan.template_options,
        special_tokens=plan.rewarding.special_tokens,
        told=told,
    )


def make_source(
    plan: RolloutPlan,
    fleet: EngineFleet,
    sampler: Sampler,
    aside: Sampler,
    reward: Scorer,
    told: Counted,
    *,
    calls: int,
    steps: int,
) -> Source:
    """The source that samples; `aside` is the sampler for background threads. `told` hears how many samples are drawn
    by a source that has no need of samplers for that."""
    settings = plan.settings
    draws = BatchSampler(
        stream=PromptStream(plan.prompts, plan.seed),
        sampler=sampler,
        reward=reward,
        params=plan.params,
        prompts=settings.prompts,
        samples=settings.samples,
        refill=DynamicSampling(useful=spread, attempts=plan.attempts) if plan.attempts else None,
    )
    match settings.source:
        case "synchronous":
            return Synchronous(draws, steps=steps)
        case "one-step-off":
            return OneStepOff(draws, evolve(draws, sampler=aside), steps=steps)
        case "asynchronous":
            return Asynchronous(draws, fleet, steps=steps, max_staleness=settings.max_staleness, calls=calls, told=told)


def unseen_tokens(plan: RolloutPlan) -> dict[int, str]:
    """The special tokens that the texts of samples leave out, by id, besides those that any tokenizer has and those
    that end samples."""
    tokenizer = plan.tokenizer
    if plan.rewarding.special_tokens:
        return {}
    common = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    known = common | set(plan.params.stop_tokens)
    return {index: token for index, token in special_tokens(tokenizer).items() if index not in known}
