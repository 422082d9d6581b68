"""Build batches from whichever samples finish first, while engines generate continuously and weights change."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import define, evolve, field, frozen

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation
from corerl.engines.continuation import append, continued, split
from corerl.engines.fleet import Counted
from corerl.errors import RewardError
from corerl.rollout.rewards.base import PartSums, Scores, added
from corerl.rollout.sampler import PromptTask, Rollout
from corerl.rollout.sources.base import BatchSampler, DynamicSampling, Scored, Source, exact_share
from corerl.types import BoolArray, FloatArray


class Engines(Protocol):
    """The engines to sample from, such as `corerl.engines.fleet.EngineFleet`."""

    def __len__(self) -> int: ...
    def draw(self, replica: int, request: GenerateRequest) -> Generation | None: ...
    def serves(self, replica: int) -> bool: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def ensure_serving(self) -> None: ...


@define(kw_only=True, eq=False)
class PromptGroup:
    """The samples of one prompt, from when they are started until they are handed out."""

    number: int  # in starting order
    prompt: Prompt
    request: GenerateRequest  # for all samples, as first issued
    tokens: int = 0  # sampled so far
    oldest: int | None = None  # the weights version that sampled the oldest of them
    # Set once everything is sampled and scored:
    rollout: Rollout | None = None
    rewards: FloatArray = field(factory=lambda: np.zeros(0, np.float32))  # [G]
    failed: BoolArray = field(factory=lambda: np.zeros(0, np.bool_))  # [G] True where scoring failed
    first_failure: str = ""  # of the call that scored the group

    def drew(self, generation: Generation) -> None:
        if len(generation.tokens):
            oldest = int(generation.versions.min())
            self.oldest = oldest if self.oldest is None else min(oldest, self.oldest)
            self.tokens += len(generation.tokens)


@frozen(kw_only=True, eq=False)
class Part:
    """Rows requested together (a whole group, or one turn of an episode) and what has been sampled for them so far."""

    group: PromptGroup
    request: GenerateRequest  # as first issued
    drawn: Generation
    told: Callable[[Generation], None]  # called with `drawn` once it is finished

    @property
    def rest(self) -> GenerateRequest:
        """The request for what is still to be sampled."""
        return continued(self.request, self.drawn)

    def followed_by(self, more: Generation) -> Part:
        self.group.drew(more)
        return evolve(self, drawn=append(self.request, self.drawn, more))

    @property
    def finished(self) -> bool:
        return not self.drawn.unfinished.any()


@define(kw_only=True)
class Tally:
    """Counts of discarded and failed samples since the last batch was handed out."""

    stale_samples: int = 0  # discarded
    stale_tokens: int = 0
    zero_variance: int = 0  # groups without spread in their rewards
    failures: Counter[str] = field(factory=Counter)  # failed samples by kind, among those scored since then
    first_failure: str = ""
    parts: PartSums = field(factory=dict)

    def give_up(self, group: PromptGroup) -> None:
        self.stale_samples += len(group.request)
        self.stale_tokens += group.tokens

    def score(self, scores: Scores) -> None:
        self.failures.update(scores.failures)
        self.first_failure = self.first_failure or scores.first
        self.parts = added(self.parts, scores.parts)

    def batch(self, step: int, groups: Sequence[PromptGroup], refill: DynamicSampling | None) -> Scored:
        """Make `groups` the batch of rollout step `step`. Raises RewardError if every sample failed to score."""
        if all(group.failed.all() for group in groups):
            samples = sum(len(group.failed) for group in groups)
            first = next((group.first_failure for group in groups if group.first_failure), self.first_failure)
            raise RewardError(f"{first}; all {samples} samples failed")
        rollout = Rollout.concatenate([group.rollout for group in groups if group.rollout is not None])
        rewards = np.concatenate([group.rewards for group in groups])
        counts = {"stale_samples": self.stale_samples, "stale_tokens": self.stale_tokens}
        if refill is not None:
            missing = len(groups) - int(refill.useful(rewards, rollout.batch.rows["group"]).sum())
            counts |= {"groups_set_aside": self.zero_variance, "groups_missing": missing}
        return Scored(
            step=step,
            rollout=rollout,
            rewards=rewards,
            exact_match=exact_share(rollout),
            seconds={},
            failures=dict(self.failures),
            first_failure=self.first_failure,
            counts=counts,
            parts=self.parts,
        )


class Asynchronous(Source):
    """Sample continuously while weights are trained. A weight update interrupts the engines; unfinished responses
    continue under the new weights, and each token keeps the version and log-prob of the weights that sampled it.

    A sample is only handed out if its oldest token is at most `max_staleness` versions behind the weights it will be
    trained with. Once any sample of a prompt misses that, the prompt is returned and resampled with other noise.

    An episode may span several versions too: an update between two turns, or during one, discards nothing that was
    said, and the episode's function keeps running meanwhile.

    At most max_staleness + 1 batches of prompts are in flight: more could not all be trained on in time. The oldest
    finished groups are handed out first. A resumed run restarts the prompts that were in flight and loses nothing
    else. Runs are not repeatable, because the engines race with the training ranks.

    Threads: `calls` per replica, each waiting for that engine, one for scoring, and one for episodes. All shared state
    changes under `_state`, and every change notifies all waiting threads.
    """

    def __init__(
        self,
        draws: BatchSampler,
        engines: Engines,
        *,
        steps: int,
        max_staleness: int,
        calls: int = 1,
        told: Counted | None = None,
    ) -> None:
        """`calls`: how many `generate` calls one replica answers concurrently. `told` hears how many samples of the
        next batch are ready, and how many it has."""
        self._told = told
        self._draws = draws
        self._engines = engines
        self._steps = steps  # rollout steps in total, including those before a resume
        self._max_staleness = max_staleness
        self._calls = calls
        self._share = max(1, draws.prompts // (len(engines) * calls)) * draws.samples  # rows of one call
        self._step = 0  # the next step
        self._begun = 0  # groups started in total
        self._version = 0  # of the weights that the next batch will be trained with

        self._state = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._background = draws.sampler.background(draws.params, self._state)
        self._groups: dict[int, PromptGroup] = {}  # in flight, by number
        self._waiting: deque[Part] = deque()  # parts waiting for an engine
        self._unscored: list[tuple[PromptGroup, Callable[[], Rollout]]] = []
        self._ready: list[PromptGroup] = []
        self._dull: list[PromptGroup] = []  # without spread; used only if too few groups have any
        self._calling = 0  # engine calls in progress
        self._idle = [0] * len(engines)  # idle threads of each replica
        self._homes: dict[int, int] = {}  # noise key -> the replica that holds this episode's prefix
        self._held = False  # while True, no engine is called
        self._closed = False
        self._failure: BaseException | None = None
        self._tally = Tally()

    # ---- in the loop's thread ---------------------------------------------------------------------------------------

    @property
    def overlaps(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Scored]:
        return self

    def __next__(self) -> Scored:
        if self._step >= self._steps:
            raise StopIteration
        started = time.perf_counter()
        if not self._threads:
            self._start()
        while (groups := self._finished()) is None:
            self._engines.ensure_serving()  # updates the weights, and so calls `updating`
        with self._state:
            tally, self._tally = self._tally, Tally()
        scored = tally.batch(self._step, groups, self._draws.refill)
        self._step += 1
        return evolve(scored, seconds={"rollout": time.perf_counter() - started})

    def _finished(self) -> list[PromptGroup] | None:
        """Wait for the groups of one batch; None if no engine is left to sample them."""
        with self._state:
            while True:
                self._raise_failure()
                self._give_up_stale()
                self._begin()  # before handing out: what starts now is sampled while this batch is trained on
                self._state.notify_all()
                if self._enough:
                    return self._hand_out()
                if not any(map(self._engines.serves, range(len(self._engines)))):
                    return None
                if self._told is not None:
                    wanted = self._draws.prompts
                    self._told(min(len(self._ready), wanted) * self._draws.samples, wanted * self._draws.samples)
                self._state.wait()

    @property
    def _enough(self) -> bool:
        """Whether a batch is ready. Groups without spread count once the allowed number of replacements is used up."""
        ready, refill = len(self._ready), self._draws.refill
        if refill is not None and self._tally.zero_variance + ready >= (1 + refill.attempts) * self._draws.prompts:
            ready += len(self._dull)
        return ready >= self._draws.prompts

    def _hand_out(self) -> list[PromptGroup]:
        # A group without tokens (say, its function failed at once) does not age.
        self._ready.sort(key=lambda group: (self._version if group.oldest is None else group.oldest, group.number))
        groups, self._ready = self._ready[: self._draws.prompts], self._ready[self._draws.prompts :]
        for group in groups:
            del self._groups[group.number]
        missing = self._draws.prompts - len(groups)
        groups, self._dull = [*groups, *self._dull[:missing]], []
        return groups

    def _begin(self) -> None:
        """Start prompts for the next batch and for those after it: one more batch if engines keep up, so that samples
        stay fresh; as many as can be trained on in time if they do not."""
        ahead = 1 if len(self._ready) >= self._draws.prompts else self._max_staleness
        batches = min(1 + ahead, self._steps - self._step)
        while len(self._groups) < batches * self._draws.prompts:
            (prompt,) = self._draws.stream.take(1)
            request = self._draws.sampler.request(
                [prompt],
                rollout_step=self._step,
                samples=self._draws.samples,
                params=self._draws.params,
                attempt=self._begun,  # no two groups of a run share noise
            )
            group = PromptGroup(number=self._begun, prompt=prompt, request=request)
            self._groups[group.number] = group
            self._begun += 1
            self._background.begin(
                PromptTask(
                    number=group.number,
                    prompt=prompt,
                    request=request,
                    ask=functools.partial(self._ask, group),
                    done=functools.partial(self._drawn, group),
                )
            )

    def _give_up_stale(self) -> None:
        """Discard every group that is too stale to train on, and return its prompt to the stream."""
        for group in [each for each in self._groups.values() if not self._fresh(each)]:
            del self._groups[group.number]
            self._background.give_up(group.number)
            self._draws.stream.give_back(group.prompt)
            self._tally.give_up(group)
        self._waiting = deque(part for part in self._waiting if self._wanted(part.group))
        self._unscored = [(group, rollout) for group, rollout in self._unscored if self._wanted(group)]
        self._ready = [group for group in self._ready if self._wanted(group)]
        self._dull = [group for group in self._dull if self._fresh(group)]

    def _fresh(self, group: PromptGroup) -> bool:
        return group.oldest is None or self._version - group.oldest <= self._max_staleness

    def _wanted(self, group: PromptGroup) -> bool:
        return group.number in self._groups

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        if self._threads:
            with self._state:
                self._raise_failure()
                self._held = True
            self._engines.pause()
            with self._state:
                self._state.wait_for(lambda: not self._calling or self._failure is not None)
                self._raise_failure()
        yield
        with self._state:
            self._version = version
            self._homes.clear()  # cached prefixes are useless under other weights
            self._give_up_stale()
        if self._threads:
            self._engines.resume()
            with self._state:
                self._held = False
                self._state.notify_all()

    def _raise_failure(self) -> None:
        """Raise the error of a failed thread here, before its consequences surface instead."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()

    # ---- resume -----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The next rollout step, the prompt stream with in-flight prompts returned, and how many groups were started,
        so that no later group reuses their noise."""
        with self._state:
            prompts = self._draws.stream.position_without(group.prompt for group in self._groups.values())
            return {"rollout_step": self._step, "prompts": prompts, "begun": self._begun}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        self._draws.stream.restore(position["prompts"])
        self._step = position["rollout_step"]
        self._begun = position.get("begun", 0)

    # ---- in threads of their own ------------------------------------------------------------------------------------

    def _start(self) -> None:
        works: list[tuple[str, Callable[[], None]]] = [("scoring", self._score), ("background", self._attend)]
        for replica in range(len(self._engines)):
            works += [(f"engine-{replica}", functools.partial(self._draw, replica))] * self._calls
        # Daemons, because the program must not wait for them: an engine may be gone, a reward may never return.
        self._threads = [
            threading.Thread(target=self._until_closed, args=(work,), name=f"rollout {name}", daemon=True)
            for name, work in works
        ]
        for thread in self._threads:
            thread.start()

    def _until_closed(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the loop's thread raises it
            with self._state:
                self._failure = self._failure or error
                self._state.notify_all()

    @property
    def _ending(self) -> bool:
        return self._closed or self._failure is not None

    def _attend(self) -> None:
        self._background.attend(lambda: self._ending)

    def _ask(self, group: PromptGroup, request: GenerateRequest, told: Callable[[Generation], None]) -> None:
        with self._state:
            if self._wanted(group):
                part = Part(group=group, request=request, drawn=Generation.nothing(request), told=told)
                self._waiting.append(part)
                self._state.notify_all()

    def _draw(self, replica: int) -> None:
        while parts := self._to_draw(replica):
            requests = [part.rest for part in parts]
            generation = self._engines.draw(replica, GenerateRequest.concatenate(requests))
            with self._state:
                self._calling -= 1
                if generation is not None:
                    more = split(generation, requests)
                    parts = [part.followed_by(drawn) for part, drawn in zip(parts, more, strict=True)]
                unfinished = [part for part in parts if not part.finished and self._wanted(part.group)]
                self._waiting.extendleft(reversed(unfinished))
                self._state.notify_all()
            for part in parts:
                if part.finished:
                    part.told(part.drawn)

    def _to_draw(self, replica: int) -> list[Part]:
        """Wait for parts to sample; [] when the source is ending."""
        with self._state:
            self._idle[replica] += 1
            self._state.wait_for(lambda: self._ending or self._for(replica))
            parts = [] if self._ending else self._share_of(self._for(replica))
            self._idle[replica] -= 1
            taken = set(map(id, parts))
            self._waiting = deque(part for part in self._waiting if id(part) not in taken)
            self._homes |= {int(key): replica for part in parts for key in part.request.noise_keys}
            self._calling += bool(parts)
            if self._waiting:  # other threads may have left these parts to this replica
                self._state.notify_all()
            return parts

    def _for(self, replica: int) -> list[Part]:
        """The parts this replica may take. A turn whose prefix another replica holds is left to it if it is idle."""
        if not self._waiting or self._held or not self._engines.serves(replica):
            return []
        away = {each for each, idle in enumerate(self._idle) if each != replica and idle and self._engines.serves(each)}
        return [part for part in self._waiting if self._homes.get(int(part.request.noise_keys[0])) not in away]

    def _share_of(self, waiting: Sequence[Part]) -> list[Part]:
        """The first part and others with its parameters, up to a call's share of rows, fewer if other threads idle
        too."""
        room = min(self._share, -(-sum(len(part.request) for part in waiting) // sum(self._idle)))
        taken: list[Part] = []
        for part in waiting:
            fits = not taken or len(part.request) <= room
            if fits and part.request.params == waiting[0].request.params:
                taken.append(part)
                room -= len(part.request)
        return taken

    def _drawn(self, group: PromptGroup, rollout: Callable[[], Rollout]) -> None:
        with self._state:
            if self._wanted(group):
                self._unscored.append((group, rollout))
                self._state.notify_all()

    def _score(self) -> None:
        while drawn := self._to_score():
            groups, rollouts = [group for group, _ in drawn], [rollout() for _, rollout in drawn]
            scores = self._draws.reward.score(Rollout.concatenate(rollouts), part=True)
            ends = np.cumsum([len(rollout.batch) for rollout in rollouts])[:-1]
            rewards, failed = np.split(scores.rewards, ends), np.split(scores.failed, ends)
            with self._state:
                self._tally.score(scores)
                for group, rollout, reward, none in zip(groups, rollouts, rewards, failed, strict=True):
                    group.rollout, group.rewards, group.failed = rollout, reward, none
                    group.first_failure = scores.first
                    if self._wanted(group):
                        self._keep(group)
                self._state.notify_all()

    def _keep(self, group: PromptGroup) -> None:
        """Add a scored group to the ready ones; if it lacks spread, set it aside so that another is started instead."""
        refill = self._draws.refill
        if refill is None or refill.useful(group.rewards, np.zeros(len(group.rewards), dtype=np.int64)).all():
            self._ready.append(group)
            return
        self._dull.append(group)
        self._tally.zero_variance += 1
        del self._groups[group.number]

    def _to_score(self) -> list[tuple[PromptGroup, Callable[[], Rollout]]]:
        with self._state:
            self._state.wait_for(lambda: self._ending or self._unscored)
            drawn, self._unscored = self._unscored, []
            return [] if self._ending else drawn
