"""Asynchronous rollouts: prompts are sampled all the time, with bounded staleness."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attrs import define, field

from corerl.rollout.sampled import PromptTask, SampledRollouts
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Policies


@define(kw_only=True, eq=False)
class AsynchronousRollouts(SampledRollouts):
    """Prompts are sampled continuously, and a step is made of those that are finished first, the oldest first.

    An update interrupts the engines; unfinished responses continue under the new weights, and each token keeps the
    version and log-prob of the weights that generated it. An episode may span several versions too; its function keeps
    running meanwhile. A sample is only handed out if its oldest token is at most `max_staleness` versions behind the
    weights it will be trained with: a prompt that misses this is returned, and sampled again with other noise. At most
    max_staleness + 1 steps of prompts are in flight, as more could not be trained on in time. A resumed run restarts
    the prompts that were in flight and loses nothing else. Such runs are not repeatable, because engines race with the
    training ranks.
    """

    max_staleness: int  # weight updates between a sample and its training

    tracks_versions: ClassVar[bool] = True

    _started: int = field(default=0, init=False)  # tasks in total
    _policies: Policies = field(factory=Policies, init=False)  # the next step will be trained with the last
    _set_aside: list[PromptTask] = field(factory=list, init=False)  # not useful; used if too few others are
    # Since the last step was handed out:
    _useless: int = field(default=0, init=False)  # tasks that were set aside
    _stale_samples: int = field(default=0, init=False)
    _stale_tokens: int = field(default=0, init=False)

    @property
    def overlaps(self) -> bool:
        return True

    def _start(self) -> None:
        """Start prompts for the next step and those after it: of one more step if engines keep up, so that samples stay
        fresh; as many as can be trained on in time if they do not."""
        self._drop_stale()
        later_steps = 1 if len(self._ready) >= self.prompts else self.max_staleness
        while len(self._in_flight) < min(1 + later_steps, self.steps - self._step) * self.prompts:
            prompts = self.stream.take(1)
            request = self._request(prompts, noise_salt=self._started)  # no two groups of a run share noise
            self._begin(PromptTask(number=self._started, prompts=prompts, request=request, background=True))
            self._started += 1

    def _keep(self, task: PromptTask) -> None:
        if task.useful.all():
            self._ready.append(task)
            return
        self._set_aside.append(task)
        self._useless += 1
        del self._in_flight[task.number]  # another one is started in its place

    def _enough(self) -> bool:
        """Tasks that were set aside count once the allowed number of replacements is used up."""
        ready = len(self._ready)
        if (
            self.dynamic_sampling is not None
            and self._useless + ready >= (1 + self.dynamic_sampling.max_replacements) * self.prompts
        ):
            ready += len(self._set_aside)
        return ready >= self.prompts

    def _age(self, task: PromptTask) -> tuple[int, int]:
        """The key that tasks are handed out by, lowest first: the policy that generated the oldest token, then the
        number. A task without tokens has the newest policy: none has come yet, or its function failed at once."""
        policies = self._policies
        return policies.newest if task.oldest is None else int(policies.of(np.array(task.oldest))), task.number

    def _hand_out(self) -> ScoredRollout:
        self._ready.sort(key=self._age)
        tasks = self._ready[: self.prompts]
        tasks += self._set_aside[: self.prompts - len(tasks)]
        counts = {"stale_samples": self._stale_samples, "stale_tokens": self._stale_tokens}
        if self.dynamic_sampling is not None:
            useful = sum(int(task.useful.sum()) for task in tasks)
            counts |= {"groups_set_aside": self._useless, "groups_missing": self.prompts - useful}
        scored = self._step_of(tasks, counts=counts)
        self._ready = self._ready[self.prompts :]
        self._set_aside = []
        self._useless = self._stale_samples = self._stale_tokens = 0
        return scored

    def _drop_stale(self) -> None:
        """Discard every task that is too stale to train on, and return its prompt to the stream."""
        for task in [each for each in self._in_flight.values() if not self._fresh(each)]:
            self._discard(task)
            self.stream.give_back(task.prompts[0])
            self._stale_samples += len(task.request)
            self._stale_tokens += task.tokens
        self._ready = [task for task in self._ready if self._fresh(task)]
        self._set_aside = [task for task in self._set_aside if self._fresh(task)]

    def _fresh(self, task: PromptTask) -> bool:
        return self._age(task)[0] + self.max_staleness >= self._policies.newest

    # ---- in the thread that updates weights -------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, policies: Policies) -> Iterator[None]:
        self.engines.loop.run(self._pause())
        yield
        self.engines.loop.run(self._resume(policies))

    async def _pause(self) -> None:
        self._require_engines()
        if self._started:
            await self.engines.pause()
        self._require_engines()

    async def _resume(self, policies: Policies) -> None:
        self._policies = policies
        self._drop_stale()
        if self._started:
            await self.engines.resume()
        self._changed.set()

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step and where its prompts begin if those in flight are returned, and how many tasks were
        started, so that no later one reuses their noise."""
        return self.engines.loop.run(self._position())

    async def _position(self) -> dict[str, Any]:
        prompts = self.stream.position_without(task.prompts[0] for task in self._in_flight.values())
        return {"rollout_step": self._step, "prompts": prompts, "begun": self._started}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        self.stream.restore(position["prompts"])
        self._step, self._started = position["rollout_step"], position.get("begun", 0)
