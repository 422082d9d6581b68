"""Build batches from whichever samples finish first, while engines generate continuously and weights change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.engines.fleet import Counted, EngineFleet
from corerl.rollout.sources.base import BatchSampler, Scored, Source
from corerl.rollout.sources.groups import Groups, PromptGroup


class Asynchronous(Source):
    """Sample continuously while weights are trained. A weight update interrupts the engines; unfinished responses
    continue under the new weights, and each token keeps the version and log-prob of the weights that sampled it.

    A sample is only handed out if its oldest token is at most `max_staleness` versions behind the weights it will be
    trained with. Once any sample of a prompt misses that, the prompt is returned and resampled with other noise; if the
    source `waits`, none does, unless an update has to be repeated.

    An episode may span several versions too: an update between two turns, or during one, discards nothing that was
    said, and the episode's function keeps running meanwhile.

    At most max_staleness + 1 batches of prompts are in flight: more could not all be trained on in time. The oldest
    finished groups are handed out first. A resumed run restarts the prompts that were in flight and loses nothing
    else. Runs are not repeatable, because the engines race with the training ranks.
    """

    overlaps = True

    def __init__(
        self,
        draws: BatchSampler,
        engines: EngineFleet,
        *,
        steps: int,
        max_staleness: int,
        waits: bool = False,
        told: Counted | None = None,
    ) -> None:
        """`waits`: for samples that would become too old, instead of handing out others first. `told` hears how many
        samples of the next batch are ready, and how many it has."""
        self._told = told
        self._draws = draws
        self._engines = engines
        self._steps = steps  # rollout steps in total, including those before a resume
        self._max_staleness = max_staleness
        self._waits = waits
        self._step = 0  # the next step
        self._begun = 0  # groups started in total
        self._version = 0  # of the weights that the next batch will be trained with

        self._groups = Groups(draws, self._keep)
        self._in_flight: dict[int, PromptGroup] = {}  # by number
        self._ready: list[PromptGroup] = []
        self._set_aside: list[PromptGroup] = []  # without spread; used only if too few groups have any
        # Since the last batch was handed out:
        self._dull = 0  # groups without spread
        self._stale_samples = self._stale_tokens = 0  # discarded

    async def next(self) -> Scored | None:
        if self._step >= self._steps:
            return None
        started = time.perf_counter()
        while True:
            self._groups.raise_failure()
            self._give_up_stale()
            self._begin()  # before handing out: what starts now is sampled while this batch is trained on
            if self._enough:
                break
            if self._told is not None:
                wanted = self._draws.prompts
                self._told(min(len(self._ready), wanted) * self._draws.samples, wanted * self._draws.samples)
            self._groups.changed.clear()
            await self._groups.changed.wait()
        scored = self._handed_out()
        self._step += 1
        return evolve(scored, seconds={"rollout": time.perf_counter() - started})

    @property
    def _enough(self) -> bool:
        """Whether a batch is ready. Groups without spread count once the allowed number of replacements is used up."""
        ready, refill = len(self._ready), self._draws.refill
        if refill is not None and self._dull + ready >= (1 + refill.attempts) * self._draws.prompts:
            ready += len(self._set_aside)
        return ready >= self._draws.prompts and (not self._waits or self._others_in_time)

    @property
    def _others_in_time(self) -> bool:
        """Whether all groups that are not ready can still be trained on in time, after those that would be handed out
        now: oldest first, one batch for each version. It can once the oldest of all are ready."""
        self._ready.sort(key=self._age)
        chosen = {group.number for group in self._ready[: self._draws.prompts]}
        ready = {group.number for group in self._ready}
        others = sorted((group for group in self._in_flight.values() if group.number not in chosen), key=self._age)
        return all(
            self._age(group)[0] + self._max_staleness > self._version + place // self._draws.prompts
            for place, group in enumerate(others)
            if group.number not in ready  # waiting for these would change nothing
        )

    def _age(self, group: PromptGroup) -> tuple[int, int]:
        """What groups are handed out by, lowest first. One without tokens does not age: none has come yet, or its
        function failed at once."""
        return self._version if group.oldest is None else group.oldest, group.number

    def _handed_out(self) -> Scored:
        self._ready.sort(key=self._age)
        groups, self._ready = self._ready[: self._draws.prompts], self._ready[self._draws.prompts :]
        for group in groups:
            del self._in_flight[group.number]
        missing = self._draws.prompts - len(groups)
        scored = self._groups.batch([*groups, *self._set_aside[:missing]], step=self._step)
        counts = {"stale_samples": self._stale_samples, "stale_tokens": self._stale_tokens}
        if self._draws.refill is not None:
            counts |= {"groups_set_aside": self._dull, "groups_missing": len(self._set_aside[:missing])}
        self._set_aside, self._dull, self._stale_samples, self._stale_tokens = [], 0, 0, 0
        return evolve(scored, counts=counts)

    def _begin(self) -> None:
        """Start prompts for the next batch and for those after it: one more batch if engines keep up, so that samples
        stay fresh; as many as can be trained on in time if they do not."""
        ahead = 1 if len(self._ready) >= self._draws.prompts else self._max_staleness
        batches = min(1 + ahead, self._steps - self._step)
        while len(self._in_flight) < batches * self._draws.prompts:
            (prompt,) = self._draws.stream.take(1)
            request = self._draws.sampler.request(
                [prompt],
                rollout_step=self._step,
                samples=self._draws.samples,
                params=self._draws.params,
                attempt=self._begun,  # no two groups of a run share noise
            )
            group = PromptGroup(number=self._begun, prompt=prompt, request=request)
            self._in_flight[group.number] = group
            self._begun += 1
            self._groups.begin(group, group.drew)

    def _give_up_stale(self) -> None:
        """Discard every group that is too stale to train on, and return its prompt to the stream."""
        for group in [each for each in self._in_flight.values() if not self._fresh(each)]:
            del self._in_flight[group.number]
            self._groups.give_up(group)
            self._draws.stream.give_back(group.prompt)
            self._stale_samples += len(group.request)
            self._stale_tokens += group.tokens
        self._ready = [group for group in self._ready if self._fresh(group)]
        self._set_aside = [group for group in self._set_aside if self._fresh(group)]

    def _fresh(self, group: PromptGroup) -> bool:
        return group.oldest is None or self._version - group.oldest <= self._max_staleness

    def _keep(self, group: PromptGroup) -> None:
        """Add a scored group to the ready ones; if it lacks spread, set it aside so that another is started instead."""
        if group.number not in self._in_flight:  # it was given up meanwhile
            return
        if group.useful:
            self._ready.append(group)
            return
        self._set_aside.append(group)
        self._dull += 1
        del self._in_flight[group.number]

    # ---- in the thread that updates weights -------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        self._engines.loop.run(self._hold())
        yield
        self._engines.loop.run(self._release(version))

    async def _hold(self) -> None:
        self._groups.raise_failure()
        if self._begun:
            await self._engines.pause()
            self._groups.raise_failure()

    async def _release(self, version: int) -> None:
        self._version = version
        self._give_up_stale()
        if self._begun:
            await self._engines.resume()
        self._groups.changed.set()

    def close(self) -> None:
        self._engines.loop.begin(self._groups.cancel())

    # ---- resume -----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step, the prompt stream with in-flight prompts returned, and how many groups were started,
        so that no later group reuses their noise."""
        return self._engines.loop.run(self._position())

    async def _position(self) -> dict[str, Any]:
        prompts = self._draws.stream.position_without(group.prompt for group in self._in_flight.values())
        return {"rollout_step": self._step, "prompts": prompts, "begun": self._begun}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        self._draws.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        self._begun = position.get("begun", 0)
