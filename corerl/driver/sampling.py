"""Assemble what produces a run's batches: sampler, scorer and source."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from corerl.algorithms.advantages import spread
from corerl.config.schema import RewardConfig, RolloutConfig
from corerl.data.prompts import PromptStream
from corerl.driver.progress import DRAWN, SCORED, Progress
from corerl.engines.base import UNLIMITED
from corerl.engines.fleet import Counted, EngineFleet
from corerl.event_loop import in_thread
from corerl.models.tokenizer import special_tokens
from corerl.plan.plan import Plan, RolloutPlan
from corerl.rollout.agents.chat_server import ChatServer
from corerl.rollout.agents.episodes import EpisodeScorer
from corerl.rollout.agents.sampler import EpisodeSampler
from corerl.rollout.rewards.base import Reward, Scorer, Scoring
from corerl.rollout.rewards.pool import scorer
from corerl.rollout.sampler import Sampler
from corerl.rollout.sources.asynchronous import Asynchronous
from corerl.rollout.sources.base import BatchSampler, DynamicSampling, Source
from corerl.rollout.sources.one_step_off import OneStepOff
from corerl.rollout.sources.recorded import SavedRollouts
from corerl.rollout.sources.streamed import Streamed
from corerl.rollout.sources.synchronous import Synchronous

in_scoring_thread = partial(in_thread, name="rollout scoring")  # for sources that score while the main thread trains
STREAMED_PARTS = 4  # of an engine's share of a batch, if it answers fewer calls at once


def start_scorer(
    reward: Reward, rewarding: RewardConfig, progress: Progress, stack: contextlib.ExitStack, *, episodes: bool
) -> Scorer:
    """A scorer of a run that samples, in processes of its own; of `episodes`, it scores those without a reward."""
    found: Scorer = stack.enter_context(scorer(reward, rewarding, partial(progress.count, SCORED)))
    return EpisodeScorer(found, failed_value=rewarding.failed_value) if episodes else found


def rows_of_a_call(rollout: RolloutConfig, *, replicas: int, calls: int) -> int:
    """The most rows of several requests that an engine gets in one call: where samples are drawn ahead, an even share
    of a batch, so that its groups are not held up by those of later batches; where training begins with those that are
    there, as few as let the calls that it answers at once hold its whole share of the batch."""
    share = rollout.prompts / replicas
    match rollout.source:
        case "asynchronous":
            prompts = math.floor(share / calls)
        case "streamed":
            # All of them at once: an engine that batches by itself decodes few rows hardly faster than many.
            prompts = math.ceil(share / max(calls, STREAMED_PARTS))
        case _:
            return UNLIMITED
    return max(1, prompts) * rollout.samples


def start_source(
    plan: Plan, fleet: EngineFleet | None, reward: Scoring, progress: Progress, stack: contextlib.ExitStack
) -> tuple[Source, Sampler | None]:
    """The source, restored if the run resumes, and the sampler, if the run samples."""
    rollout, engine, start = plan.rollout, plan.processes.engine, plan.start
    told = partial(progress.count, DRAWN)
    sampler: Sampler | None = None
    if fleet is not None and engine is not None:
        sampler = make_sampler(rollout, fleet, told, stack, calls=engine.calls)
    state = start.state if plan.run.trains else {}
    return source_at(state, start.resume, plan, fleet, sampler, reward, progress, stack), sampler


def source_at(
    state: Mapping[str, Any],
    checkpoint: Path | None,
    plan: Plan,
    fleet: EngineFleet | None,
    sampler: Sampler | None,
    reward: Scoring,
    progress: Progress,
    stack: contextlib.ExitStack,
) -> Source:
    """The source where a checkpoint's state says, or at its beginning if that is empty; `stack` closes it."""
    rollout = plan.rollout
    source: Source
    if fleet is None or sampler is None:
        source = SavedRollouts(rollout.settings.saved, steps=plan.run.steps, vocab_size=rollout.vocab_size)
    else:
        source = make_source(rollout, fleet, sampler, reward, partial(progress.count, DRAWN), steps=plan.run.steps)
    stack.callback(source.close)
    if state:
        source.restore(state["source"], checkpoint)
    return source


def make_sampler(
    plan: RolloutPlan, fleet: EngineFleet, told: Counted, stack: contextlib.ExitStack, *, calls: int
) -> Sampler:
    """A sampler of single responses, or of the episodes that the run's function plays, with at most `calls` at a time
    in each engine. `told` hears how many samples are drawn."""
    if plan.function is None:
        return Sampler(
            tokenizer=plan.tokenizer,
            generate=fleet.generate,
            seed=plan.seed,
            template_options=plan.template_options,
            special_tokens=plan.rewarding.special_tokens,
            told=told,
        )
    settings = plan.settings
    server = ChatServer(fleet.loop, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
    stack.callback(server.close)
    return EpisodeSampler(
        tokenizer=plan.tokenizer,
        generate=fleet.generate,
        seed=plan.seed,
        function=plan.function,
        server=server,
        config=settings.episodes,
        calls=calls,
        context_length=plan.context_length,
        template_options=plan.template_options,
        special_tokens=plan.rewarding.special_tokens,
        told=told,
    )


def make_source(
    plan: RolloutPlan, fleet: EngineFleet, sampler: Sampler, reward: Scoring, told: Counted, *, steps: int
) -> Source:
    """The source that samples. `told` hears how many samples are drawn by one that draws ahead."""
    settings = plan.settings
    draws = BatchSampler(
        stream=PromptStream(plan.prompts, plan.seed),
        sampler=sampler,
        reward=reward,
        params=plan.params,
        prompts=settings.prompts,
        samples=settings.samples,
        refill=DynamicSampling(useful=spread, attempts=plan.attempts, part=plan.spread_on) if plan.attempts else None,
    )
    match settings.source:
        case "synchronous":
            return Synchronous(draws, steps=steps)
        case "streamed":
            return Streamed(draws, fleet.loop, steps=steps, told=told)
        case "one-step-off":
            return OneStepOff(draws, fleet, steps=steps)
        case "asynchronous":
            return Asynchronous(
                draws,
                fleet,
                steps=steps,
                max_staleness=settings.max_staleness,
                waits=settings.stale == "wait",
                told=told,
            )


def unseen_tokens(plan: RolloutPlan) -> dict[int, str]:
    """The special tokens that the texts of samples leave out, by id, besides those that any tokenizer has and those
    that end samples."""
    tokenizer = plan.tokenizer
    if plan.rewarding.special_tokens:
        return {}
    common = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    known = common | set(plan.params.stop_tokens)
    return {index: token for index, token in special_tokens(tokenizer).items() if index not in known}
