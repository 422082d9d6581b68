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
from corerl.engines.fleet import EngineFleet
from corerl.event_loop import in_thread
from corerl.models.tokenizer import special_tokens
from corerl.plan.plan import Plan, RolloutPlan
from corerl.rollout.rewards.base import OutcomeScorer, Reward, Scorer, Scoring
from corerl.rollout.rewards.pool import scorer
from corerl.rollout.sampler import Sampler, SamplerContext
from corerl.rollout.sources.asynchronous import Asynchronous
from corerl.rollout.sources.base import BatchSampler, DynamicSampling, Source
from corerl.rollout.sources.one_step_off import OneStepOff
from corerl.rollout.sources.recorded import SavedRollouts
from corerl.rollout.sources.streamed import Streamed
from corerl.rollout.sources.synchronous import Synchronous

in_scoring_thread = partial(in_thread, name="rollout scoring")  # for sources that score while the main thread trains
STREAMED_PARTS = 4  # of an engine's share of a batch, if it answers fewer calls at once


def start_scorer(reward: Reward, rewarding: RewardConfig, progress: Progress, stack: contextlib.ExitStack) -> Scorer:
    """A scorer of a run that samples, in processes of its own; it scores the samples that bring no reward."""
    found: Scorer = stack.enter_context(scorer(reward, rewarding, partial(progress.count, SCORED)))
    return OutcomeScorer(found, failed_value=rewarding.failed_value)


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
    start = plan.start
    sampler: Sampler | None = None
    if fleet is not None:
        sampler = make_sampler(plan, fleet, progress, stack, special_tokens=plan.rollout.rewarding.special_tokens)
    state = start.state if plan.run.trains else {}
    return source_at(state, start.resume, plan, fleet, sampler, reward, progress, stack), sampler


def samplers_of_sets(
    plan: Plan, fleet: EngineFleet | None, sampler: Sampler | None, progress: Progress, stack: contextlib.ExitStack
) -> list[Sampler]:
    """The sampler of each set of held-out prompts: the run's, or one whose texts have special tokens as the set's own
    reward reads them."""
    if fleet is None or sampler is None:
        return []
    found = {plan.rollout.rewarding.special_tokens: sampler}
    for kept in [each.rewarding.special_tokens for each in plan.eval_sets]:
        if kept not in found:
            found[kept] = make_sampler(plan, fleet, progress, stack, special_tokens=kept)
    return [found[each.rewarding.special_tokens] for each in plan.eval_sets]


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
        source = make_source(rollout, fleet, sampler, reward, progress, steps=plan.run.steps)
    stack.callback(source.close)
    if state:
        source.restore(state["source"], checkpoint)
    return source


def make_sampler(
    plan: Plan, fleet: EngineFleet, progress: Progress, stack: contextlib.ExitStack, *, special_tokens: bool
) -> Sampler:
    """The run's sampler, whose texts keep `special_tokens` or not; `stack` closes it."""
    rollout, engine = plan.rollout, plan.processes.engine
    made = rollout.sampler(
        SamplerContext(
            tokenizer=rollout.tokenizer,
            generate=fleet.generate,
            loop=fleet.loop,
            seed=rollout.seed,
            params=rollout.params,
            template_options=rollout.template_options,
            special_tokens=special_tokens,
            context_length=rollout.context_length,
            calls=1 if engine is None else engine.calls,
            on_progress=partial(progress.count, DRAWN),
        )
    )
    stack.callback(made.close)
    return made


def make_source(
    plan: RolloutPlan, fleet: EngineFleet, sampler: Sampler, reward: Scoring, progress: Progress, *, steps: int
) -> Source:
    """The source that samples."""
    settings, told = plan.settings, partial(progress.count, DRAWN)
    draws = BatchSampler(
        stream=PromptStream(plan.prompts, plan.seed, check=plan.check, notify=progress.notice),
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
