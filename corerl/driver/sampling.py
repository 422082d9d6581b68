"""Assemble what produces a run's batches: sampler, scorer and source; and evaluate on held-out prompts."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import Factory, define, field

from corerl.algorithms.advantages import spread
from corerl.config.schema import RewardConfig, RolloutConfig
from corerl.data.prompts import PromptStream
from corerl.driver.progress import GENERATED, SCORED, Progress
from corerl.engines.base import UNLIMITED
from corerl.engines.fleet import EngineFleet
from corerl.event_loop import EventLoop, in_thread
from corerl.observability.timing import SCORING
from corerl.pictures import save_pictures
from corerl.plan.plan import Plan
from corerl.plugin.events import Evaluated, SampleShown
from corerl.rollout.asynchronous import AsynchronousRollouts
from corerl.rollout.evaluation import EvalSet, Evaluation, evaluate
from corerl.rollout.ordered import OneStepOffRollouts, OrderedRollouts
from corerl.rollout.recorded import SavedRollouts
from corerl.rollout.reward_processes import RewardPool
from corerl.rollout.rewards import Reward
from corerl.rollout.sampled import DynamicSampling
from corerl.rollout.sampler import Sampler, SamplerContext
from corerl.rollout.scoring import AsyncScorer, RewardScorer
from corerl.rollout.source import Source

in_scoring_thread = partial(in_thread, name="rollout scoring")  # for sources that score while the main thread trains
STREAMED_PARTS = 4  # of an engine's part of a batch, if it answers fewer calls at once


def start_rewards(
    plan: Plan, loop: EventLoop, progress: Progress, stack: contextlib.ExitStack
) -> tuple[AsyncScorer, list[AsyncScorer]]:
    """The run's reward, and that of each set of held-out prompts; those of a run that samples get processes."""

    turn = asyncio.Lock()
    call = loop.in_caller if plan.rollout.settings.source == "synchronous" else in_scoring_thread

    def start(reward: Reward, rewarding: RewardConfig) -> AsyncScorer:
        outcomes = reward.outcomes
        if rewarding.processes and plan.run.has_engines:
            outcomes = stack.enter_context(contextlib.closing(RewardPool(reward, rewarding, progress.notice))).outcomes
        scorer = RewardScorer(reward, outcomes, on_progress=partial(progress.count, SCORED))
        return AsyncScorer(scorer, call, span=partial(progress.spans, SCORING), turn=turn)

    reward = start(plan.rollout.reward, plan.rollout.rewarding)
    sets = [reward if each.reward is None else start(each.reward, each.rewarding) for each in plan.eval_sets]
    return reward, sets


def rows_of_a_call(rollout: RolloutConfig, *, replicas: int, calls: int) -> int:
    """The most rows of several requests that an engine gets in one call: where steps are sampled ahead, an even part
    of a batch, so that its groups are not held up by those of later batches; where training begins with those that are
    there, as few as let the calls that it answers at once hold its whole part of the batch."""
    part = rollout.prompts / replicas
    match rollout.source:
        case "asynchronous":
            prompts = math.floor(part / calls)
        case "streamed":
            # All of them at once: an engine that batches by itself decodes few rows hardly faster than many.
            prompts = math.ceil(part / max(calls, STREAMED_PARTS))
        case _:
            return UNLIMITED
    return max(1, prompts) * rollout.samples


@define(kw_only=True, eq=False)
class Sampling:
    """What a run samples with: its source of rollout steps, its samplers, and the sets of held-out prompts."""

    plan: Plan
    fleet: EngineFleet | None  # None if nothing is sampled
    loop: EventLoop
    rewards: tuple[AsyncScorer, Sequence[AsyncScorer]]  # the run's, and each held-out set's
    progress: Progress
    stack: contextlib.ExitStack  # closes sources and samplers

    source: Source = field(init=False)
    # Those that have prompts; that of `data.held_out` comes first.
    eval_sets: list[tuple[EvalSet, Sampler, AsyncScorer]] = field(init=False)
    _samplers: dict[bool, Sampler] = field(factory=dict, init=False)  # by whether their texts keep special tokens

    def __attrs_post_init__(self) -> None:
        start = self.plan.start
        self.restart(start.state if self.plan.run.trains else {}, start.resume)
        self.eval_sets = [
            (each, self.sampler_of(each.rewarding), reward)
            for each, reward in zip(self.plan.eval_sets, self.rewards[1], strict=True)
            if self.fleet is not None and each.source.held_out_prompts()
        ]

    @property
    def sampler(self) -> Sampler | None:
        """The run's."""
        return None if self.fleet is None else self.sampler_of(self.plan.rollout.rewarding)

    def sampler_of(self, rewarding: RewardConfig) -> Sampler:
        """The sampler whose texts have special tokens as this reward reads them."""
        kept, rollout, engine = rewarding.special_tokens, self.plan.rollout, self.plan.processes.engine
        assert self.fleet is not None and rollout.make_sampler is not None
        if kept not in self._samplers:
            self._samplers[kept] = rollout.make_sampler(
                SamplerContext(
                    tokenizer=rollout.tokenizer,
                    generate=self.fleet.generate,
                    loop=self.loop,
                    seed=rollout.seed,
                    params=rollout.params,
                    template_options=rollout.template_options,
                    special_tokens=kept,
                    context_length=rollout.context_length,
                    pictures=rollout.pictures,
                    calls=1 if engine is None else engine.calls,
                    cache_use=self.fleet.cache_use,
                    environment=self.plan.processes.environment,
                    on_progress=partial(self.progress.count, GENERATED),
                )
            )
            self.stack.callback(self._samplers[kept].close)
        return self._samplers[kept]

    def restart(self, state: Mapping[str, Any], checkpoint: Path | None) -> None:
        """Begin with another source, where a checkpoint's state says, or at the first prompt if that is empty."""
        rollout = self.plan.rollout
        if self.fleet is None or self.sampler is None:
            steps = self.plan.run.steps
            self.source = SavedRollouts(
                rollout.settings.saved,
                steps=steps,
                vocab_size=rollout.vocab_size,
                pictures=rollout.pictures is not None,
            )
        else:
            before = state.get("config", {}).get("algorithm", {})
            self.source = self._source(self.fleet, self.sampler, known_part=before.get("dynamic_sampling_on", ""))
        self.stack.callback(self.source.close)
        if state:
            self.source.restore(state["source"], checkpoint)

    def _source(self, fleet: EngineFleet, sampler: Sampler, *, known_part: str) -> Source:
        """The source that samples. `known_part`: the one that decided dynamic sampling in the checkpoint's run."""
        plan, settings = self.plan.rollout, self.plan.rollout.settings
        dynamic_sampling = None
        if most := plan.max_replacements:
            part = plan.spread_on
            known = part in ("", known_part)
            dynamic_sampling = DynamicSampling(useful=spread, max_replacements=most, part=part, known=known)
        by_prompt = settings.source in ("streamed", "asynchronous")
        fields: dict[str, Any] = {
            "stream": PromptStream(plan.prompts, plan.seed, check=plan.check, notify=self.progress.notice),
            "sampler": sampler,
            "reward": self.rewards[0],
            "params": plan.params,
            "prompts": settings.prompts,
            "samples": settings.samples,
            "dynamic_sampling": dynamic_sampling,
            "engines": fleet,
            "steps": self.plan.run.steps,
            "on_progress": partial(self.progress.count, GENERATED) if by_prompt else None,
        }
        if settings.source == "asynchronous":
            return AsynchronousRollouts(max_staleness=settings.max_staleness, **fields)
        if settings.source == "one-step-off":
            return OneStepOffRollouts(**fields)
        return OrderedRollouts(singly=settings.source == "streamed", **fields)


def answers_in(state: Mapping[str, Any]) -> tuple[SampleShown, ...]:
    """The first evaluation's answers, from a checkpoint's state."""
    return tuple(SampleShown(**shown) for shown in state.get("before", []))


def _questions(answers: Sequence[SampleShown]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(shown.prompt, shown.answer, shown.pictures) for shown in answers]


@define(kw_only=True, eq=False)
class Evaluations:
    """The evaluations of a run. When they are due depends only on the steps done, so a resumed run evaluates at the
    same steps as an uninterrupted one."""

    plan: Plan
    sampling: Sampling
    progress: Progress

    # Answers of the first evaluation, which a resumed run reads from its checkpoint, and of the last one.
    before: tuple[SampleShown, ...] = field(
        default=Factory(lambda self: answers_in(self.plan.start.state) if self.plan.run.trains else (), takes_self=True)
    )
    after: tuple[SampleShown, ...] = ()
    metrics: dict[str, float] = field(factory=dict)  # of the last one

    @property
    def any_due(self) -> bool:
        return any(self._due(eval_set) for eval_set, *_ in self.sampling.eval_sets)

    def run(self, served: Callable[[Coroutine[Any, Any, Evaluation]], Evaluation], *, always: bool = False) -> None:
        """Evaluate on the sets of prompts that are due, or on all; `served` waits for one of these."""
        due = [each for each in self.sampling.eval_sets if always or self._due(each[0])]
        if not due:
            return
        found = []
        for eval_set, sampler, reward in due:
            with self.progress.phase("eval"):
                found.append(served(evaluate(sampler, eval_set, reward)))
            if first := found[-1].first_failure:
                failed = sum(found[-1].failures.values())
                why = f"{failed} samples failed; the first: {first}" if failed else first
                self.progress.notice(f"evaluation{f' of {eval_set.name!r}' * bool(eval_set.name)}: {why}")
        shown = found[0].shown
        save_pictures(found[0].pictures, self.plan.start.run_dir)
        if due[0] is self.sampling.eval_sets[0]:
            if _questions(self.before) != _questions(shown):  # the checkpoint's may be of other data
                self.before = shown
            self.after = shown
        self.metrics = {name: value for each in found for name, value in each.metrics.items()}
        self.progress.emit(
            Evaluated(
                step=self.progress.steps_done,
                metrics=self.metrics,
                shown=shown,
                samples=[sample for each in found for sample in each.samples],
            )
        )

    def _due(self, eval_set: EvalSet) -> bool:
        if not eval_set.every or self.sampling.sampler is None:
            return False
        step = self.progress.steps_done
        if step == 0:
            return self.plan.eval.at_start
        return step % eval_set.every == 0 or step >= self.plan.run.steps
