"""Samplers: each is bound to the weights that it was made of, and answers with these or not at all.

Weights have numbers: 0 are those that the ranks start with, each change gives others, and teachers have some below 0.
Engines hold those that were pushed last, of adapters several, and sample from them by name; of some earlier ones, and
of teachers, ranks keep a copy, under which prompts get their log-probs, and which is pushed again for who samples.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from attrs import evolve
from tinker.types import SampleRequest

from corerl import Engines, Output, SampleBatch
from corerl.engines import GenerateRequest, Generation, PromptScores
from corerl.errors import CorerlError, EngineFailed, VersionGone
from corerl.types import FloatArray, IntArray, offsets_of
from corerl_tinker.requests import InTurn, Refused, Sampler

START = 0  # the weights that the ranks start with
LONGEST_WAIT = 600.0  # seconds for samples in flight, before the weights that they are sampled from go
ATTEMPTS = 3  # to sample a row whose engines die or are replaced meanwhile; a row of the same noise is sampled alike


class Samplers:
    """The samplers of one server. All but `draw` is called by the thread of the group."""

    def __init__(self, engines: Engines, *, keep: int, teachers: Mapping[int, str]) -> None:
        """`keep`: how many earlier weights the ranks keep a copy of, besides those they started with; `teachers`: the
        models' directories, by the numbers of their weights."""
        self._engines = engines
        self._keep = keep
        self._sources = {START: "", **teachers}  # of copies that ranks load again, should they have restarted
        self.now = START  # the number of the weights in the ranks
        self._last = START  # the highest number that was given
        self._added = 0  # samplers, so far
        self._kept: list[int] = []  # the numbers of copies in the ranks, the one used last at the end
        # What follows is shared by the thread of the group and those who sample, under this lock.
        self._changing = threading.Condition()
        self._numbers: dict[int, int] = {}  # by the engines' versions; the one that was sampled from last at the end
        self._going: tuple[int, ...] = ()  # versions that engines are about to lose, from which no sample begins
        self._in_flight: Counter[int] = Counter()  # samples by version

    # ---- weights -----------------------------------------------------------------------------------------------------

    def changed(self, number: int | None = None) -> None:
        """The weights in the ranks are others now, those of an earlier `number` or new ones."""
        self._last += number is None
        self.now = self._last if number is None else number

    def restarting(self) -> None:
        """The ranks end with all that they kept. Until `changed`, nobody's weights are in their place."""
        self._kept.clear()
        self.changed()

    def keep(self, number: int | None = None) -> None:
        """Keep a copy of the weights as they are, or of such as ranks can load again: a teacher's, and those at the
        start. The one that was not used for longest goes, if there are too many."""
        number = self.now if number is None else number
        if number not in self._kept:
            self.turn("forward")
            copy = self._engines.group.snapshot(_name(number))
            (copy.create() if number == self.now else copy.load(self._sources[number])).result()
        self._kept = [*(each for each in self._kept if each != number), number]
        for each in [each for each in self._kept if each > START][: -self._keep]:
            self._kept.remove(each)
            self._engines.group.snapshot(_name(each)).drop().result()

    def has(self, number: int) -> bool:
        """Whether a sampler of these weights can be answered anything."""
        return number in (self.now, *self._kept, *self._sources, *self._held())

    def _held(self) -> dict[int, int]:
        """The versions under which engines hold weights, by the numbers of these, in the order of their use."""
        with self._changing:
            held = self._engines.held
            return {number: version for version, number in self._numbers.items() if version in held}

    def turn(self, stage: Literal["train", "forward", "save"]) -> None:
        """Before ranks do such work. Where they share devices with engines, these finish what they are at and sleep."""
        if not self._engines.takes_turns:
            return
        with self._losing(self._engines.held):
            self._engines.turn(stage)

    def push(self, sampler: Sampler | None = None) -> None:
        """Let engines hold the weights as they are, or a sampler's, of which ranks have a copy. Samples in flight are
        only waited for if they are of a version that goes."""
        number = self.now if sampler is None else sampler.weights
        if number in self._held():
            return
        copy = "" if sampler is None else self._copy(sampler)
        with self._losing(self._least_used()) as forget:
            version = self._push(copy, next(iter(forget), None))
            with self._changing:
                self._numbers = {**{held: each for each, held in self._held().items()}, version: number}

    def _push(self, copy: str, forget: int | None) -> int:
        """Raises Refused where engines have failed for good, and ranks have not: only sampling has come to its end."""
        try:
            return self._engines.push(snapshot=copy, forget=forget)
        except CorerlError as error:
            if self._engines.group.processes.ended:
                raise
            raise Refused(
                f"engines do not take the weights: {error.message}; the model can still be trained and saved, and is "
                "sampled from once `corerl serve` has been restarted",
                category="server",
            ) from error

    def _least_used(self) -> tuple[int, ...]:
        """The version in whose place another one comes, if one has to go: rather one without samples in flight."""
        held, engines = tuple(self._held().values()), self._engines
        # On shared devices engines sleep before weights come, and keep none.
        most = engines.config.versions if engines.separate_adapters and not engines.takes_turns else 1
        idle_first = sorted(held, key=lambda each: self._in_flight[each] > 0)
        return tuple(idle_first[:1]) if len(held) >= most else ()

    @contextlib.contextmanager
    def _losing(self, versions: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """A context in which no samples of these versions begin, once those in flight have ended."""
        with self._changing:
            self._going = versions
            self._changing.wait_for(lambda: not any(self._in_flight[each] for each in versions), LONGEST_WAIT)
        try:
            yield versions
        finally:
            with self._changing:
                self._going = ()

    def _copy(self, sampler: Sampler) -> str:
        """The name of the ranks' copy of a sampler's weights; "" if they are those of now. Raises Refused if ranks have
        none."""
        number = sampler.weights
        if number == self.now:
            return ""
        if number not in (*self._kept, *self._sources):
            raise Refused(
                f"the weights of {sampler.name} (version {number}) are gone: ranks hold version {self.now}, and copies "
                f"of {', '.join(map(str, sorted(self._kept))) or 'none'}; copies of {self._keep} are kept "
                "(serve.snapshots), and all go when ranks restart for another model"
            )
        self.keep(number)
        return _name(number)

    # ---- samplers ----------------------------------------------------------------------------------------------------

    def add(self, weights: int, name: str, *, base_model: str, model_path: str | None = None) -> Sampler:
        """A new sampler of these weights."""
        self._added += 1
        return Sampler(number=self._added, weights=weights, name=name, base_model=base_model, model_path=model_path)

    async def draw(
        self, sampler: Sampler, asked: SampleRequest, request: GenerateRequest, in_turn: InTurn
    ) -> Generation:
        """Sample, and score the prompt if that is asked for. Raises Refused where the sampler's weights are gone."""
        prompt, scores = request.tokens[: asked.prompt.length], None
        if asked.prompt_logprobs and not request.params.scored_top:  # else they are the engines', with likely tokens
            logprobs = await in_turn(partial(self._scores, sampler), prompt, ("scores", sampler.weights))
            logprobs[: len(prompt) - (asked.prompt_logprobs_last_n or len(prompt))] = np.nan
            scores = evolve(PromptScores.unknown(len(prompt), request.params), logprobs=logprobs)
        if scores is not None and request.params.max_tokens == 1 and sampler.weights not in (self.now, *self._held()):
            # Who asks for log-probs of a prompt has to ask for a token too, which nobody reads.
            return evolve(Generation.nothing(request), scores=scores)
        found = await self._sampled(sampler, request, in_turn)
        return found if scores is None else evolve(found, scores=scores)

    async def _sampled(self, sampler: Sampler, request: GenerateRequest, in_turn: InTurn) -> Generation:
        begun, held = self._begin(sampler, request), partial(self._begin_held, sampler)
        for _ in range(ATTEMPTS):
            try:
                begun = begun or await in_turn(held, request, ("samples", sampler.weights))
                if begun is None:  # an error of this request alone: what fails in turn is the end of the model
                    raise EngineFailed("all engines died as soon as they had the weights")
                return await asyncio.wrap_future(begun)
            except (EngineFailed, VersionGone) as error:  # others start in the place of dead ones only by a push
                begun, failed = None, error
        raise failed

    def _begin_held(
        self, sampler: Sampler, requests: Sequence[GenerateRequest]
    ) -> list[concurrent.futures.Future[Generation] | None]:
        """Begin what waits, once engines hold the weights."""
        self.push(sampler)
        return [self._begin(sampler, each) for each in requests]

    def _begin(self, sampler: Sampler, request: GenerateRequest) -> concurrent.futures.Future[Generation] | None:
        """The samples; None if engines do not hold the sampler's weights. Always of one version by its name: the newest
        one may be a copy's."""
        with self._changing:
            version = self._held().get(sampler.weights)
            if version is None or version in self._going:
                return None
            self._in_flight[version] += 1
            self._numbers[version] = self._numbers.pop(version)
        try:
            work = self._engines.begin(evolve(request, version=version))
        except BaseException:
            self._ended(version)
            raise
        work.add_done_callback(lambda _: self._ended(version))
        return work

    def _ended(self, version: int) -> None:
        with self._changing:
            self._in_flight[version] -= 1
            self._changing.notify_all()

    def _scores(self, sampler: Sampler, rows: Sequence[IntArray]) -> list[FloatArray]:
        """[n] each: the log-probs of a prompt's tokens, NaN at the first."""
        copy = self._copy(sampler)
        self.turn("forward")
        offsets = offsets_of([len(row) for row in rows])
        mask = np.ones(offsets[-1], np.bool_)
        mask[offsets[:-1]] = False
        samples = SampleBatch(tokens=np.concatenate(rows), offsets=offsets, columns={"loss_mask": mask})
        found = self._engines.group.forward(samples, Output.LOGPROBS, snapshot=copy).result()[Output.LOGPROBS]
        return np.split(np.where(mask, found, np.nan).astype(np.float32), offsets[1:-1])


def _name(number: int) -> str:
    """Of the ranks' copy of these weights."""
    return f"weights-{number}"
