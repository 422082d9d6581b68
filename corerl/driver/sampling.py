"""Assemble what produces a run's batches: sampler, scorer and source."""

from __future__ import annotations

import contextlib
from functools import partial

from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.data.prompts import PromptStream
from corerl.driver.prepare import Prepared
from corerl.driver.progress import DRAWN, SCORED, Progress
from corerl.models.tokenizer import special_tokens
from corerl.rollout.asynchronous import Asynchronous
from corerl.rollout.episodes import EpisodeScorer
from corerl.rollout.fleet import Counted, EngineFleet
from corerl.rollout.front import Front
from corerl.rollout.one_step_off import OneStepOff
from corerl.rollout.play import EpisodeSampler
from corerl.rollout.postprocess import Postprocessed
from corerl.rollout.reward_pool import scorer
from corerl.rollout.rewards import InTurn, Scorer
from corerl.rollout.sampler import Sampler
from corerl.rollout.saved import ROLLOUTS, Kept, SavedRollouts
from corerl.rollout.sources import Draws, Refill, Source, Synchronous


def start_scorer(prepared: Prepared, progress: Progress, stack: contextlib.ExitStack) -> Scorer:
    """The run's scorer; it uses processes of its own if the run samples."""
    config = prepared.config
    if not config.run.samples:
        return prepared.reward
    # The source may score in its own thread while the loop evaluates.
    reward: Scorer = InTurn(
        stack.enter_context(scorer(prepared.reward, config.reward, partial(progress.count, SCORED)))
    )
    if prepared.function is not None:
        reward = EpisodeScorer(reward, failed_value=config.reward.failed_value)
    return reward


def start_source(
    prepared: Prepared, fleet: EngineFleet | None, reward: Scorer, progress: Progress, stack: contextlib.ExitStack
) -> tuple[Source, Sampler | None]:
    """The source, restored if the run resumes, and the sampler for the loop's thread, if the run samples."""
    config, state = prepared.config, prepared.state
    told = partial(progress.count, DRAWN)
    sampler: Sampler | None = None
    aside: Sampler | None = None
    if fleet is not None:
        front: Front | None = None
        if prepared.function is not None:
            rollout = config.rollout
            front = Front(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
            stack.callback(front.close)
        sampler = make_sampler(prepared, fleet, front, told)
        aside = make_sampler(prepared, fleet, front, told, aside=True)
    source = make_source(prepared, fleet, sampler, aside, reward, told)
    stack.callback(source.close)
    if state and config.run.trains:
        source.restore(state["source"], prepared.resume)
    return source, sampler


def make_sampler(
    prepared: Prepared, fleet: EngineFleet, front: Front | None, told: Counted, *, aside: bool = False
) -> Sampler:
    """A sampler of single responses, or of the episodes that the run's function plays through `front`. `told` hears how
    many samples are drawn. `aside`: for a thread that does not update weights."""
    generate = fleet.generate_aside if aside else fleet.generate
    seed, tokenizer = prepared.config.run.seed, prepared.tokenizer
    template_options = prepared.config.data.chat_template_options
    special_tokens = prepared.config.reward.special_tokens
    if prepared.function is None or front is None:
        return Sampler(
            tokenizer=tokenizer,
            generate=partial(generate, told=told),
            seed=seed,
            template_options=template_options,
            special_tokens=special_tokens,
        )
    return EpisodeSampler(
        tokenizer=tokenizer,
        generate=generate,
        seed=seed,
        function=prepared.function,
        front=front,
        config=prepared.config.rollout.episodes,
        aside=fleet.generate_aside,
        calls=calls_of(prepared),
        longest_prompt=prepared.longest_prompt,
        template_options=template_options,
        special_tokens=special_tokens,
        told=told,
    )


def make_source(
    prepared: Prepared,
    fleet: EngineFleet | None,
    sampler: Sampler | None,
    aside: Sampler | None,
    reward: Scorer,
    told: Counted,
) -> Source:
    """The source, which samples or reads batches; `aside` is the sampler for background threads. `told` hears how many
    samples are drawn by a source that has no need of samplers for that."""
    config = prepared.config
    rollout, steps = config.rollout, config.run.steps
    source: Source
    if fleet is None or sampler is None or aside is None:
        source = SavedRollouts(rollout.saved, steps=steps, vocab_size=prepared.vocab_size)
    else:
        attempts = config.algorithm.dynamic_sampling or 0
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
                    draws,
                    fleet,
                    steps=steps,
                    max_staleness=rollout.max_staleness,
                    calls=calls_of(prepared),
                    told=told,
                )
    if config.rollout.save or config.run.mode == "rollout-only":
        source = Kept(source, prepared.run_dir / ROLLOUTS)
    if prepared.postprocess is not None:
        source = Postprocessed(source, prepared.postprocess, config.rollout.postprocess)
    return source


def unseen_tokens(prepared: Prepared) -> dict[int, str]:
    """The special tokens that the texts of a run's samples leave out, by id, besides those that any tokenizer has and
    those that end samples."""
    tokenizer = prepared.tokenizer
    if prepared.config.reward.special_tokens or not prepared.config.run.samples:
        return {}
    common = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    known = common | set(prepared.params.stop_tokens)
    return {index: token for index, token in special_tokens(tokenizer).items() if index not in known}


def calls_of(prepared: Prepared) -> int:
    """How many `generate` calls one engine of the run answers concurrently."""
    return prepared.plan.engine.spec.calls(prepared.config.engines[prepared.plan.engine.name], prepared.plan.engines)
