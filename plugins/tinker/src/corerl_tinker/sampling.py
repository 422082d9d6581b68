"""Samplers: each is bound to the weights that it was made of, and answers with these or not at all.

Weights have numbers: 0 are those that the ranks start with, each change gives others, and teachers have some below 0.
Engines hold those that were pushed last, of adapters several, and sample from them by name; of some earlier ones, and
of teachers, ranks keep a copy, under which prompts get their log-probs, and which is pushed again for who samples.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from attrs import define, evolve

from corerl import Engines, Output, SampleBatch
from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl.errors import EngineFailed, VersionGone
from corerl.ops import hash_key
from corerl.types import FloatArray, IntArray, offsets_of
from corerl_tinker.requests import Draw, Drawn, InTurn, Refused

START = 0  # the weights that the ranks start with
LONGEST_WAIT = 600.0  # seconds for samples in flight, before the weights that they are sampled from go
ATTEMPTS = 3  # to sample a row whose engines die or are replaced meanwhile; a row of the same noise is sampled alike
Samples = concurrent.futures.Future[Generation]


@define(kw_only=True, eq=False)
class Sampler:
    """What a client samples from."""

    number: int  # of the sampler, the same each time a client does the same
    weights: int | None  # their number; None: those that were published last, while this model is trained
    name: str  # for messages


@define(eq=False)
class _Prompt:
    """A prompt that waits for its log-probs [n]."""

    tokens: IntArray
    logprobs: FloatArray | None = None


@define(eq=False)
class _Asked:
    """Samples that wait for engines to hold their weights."""

    sampler: Sampler
    request: GenerateRequest
    begun: Samples | None = None


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
        self._samplers: dict[str, Sampler] = {}
        self._kept: list[int] = []  # the numbers of copies in the ranks, the one used last at the end
        # What follows is changed by the thread of the group and read by those who sample.
        self._changing = threading.Condition()
        # Version of the engines -> the number of the weights; the one that was sampled from last at the end. Another
        # dict with each change: it is read without the lock.
        self._numbers: dict[int, int] = {}
        self._published = START  # the number of the weights that were pushed last as they were, and not from a copy
        self._going: tuple[int, ...] = ()  # versions that engines are about to lose, from which no sample begins
        self._in_flight: Counter[int] = Counter()  # samples by version
        self._waiting: dict[int, list[_Prompt]] = {}  # by weights
        self._asked: dict[int | None, list[_Asked]] = {}  # by weights

    # ---- weights -----------------------------------------------------------------------------------------------------

    def changed(self, number: int | None = None) -> None:
        """The weights in the ranks are others now, those of an earlier `number` or new ones."""
        self._last += number is None
        self.now = self._last if number is None else number

    def restarting(self) -> None:
        """The ranks end with all that they kept. Until `changed`, nobody's weights are in their place."""
        self._kept.clear()
        self.changed()

    def keep(self) -> None:
        """Keep a copy of the weights as they are. The one that was not used for longest goes, if there are too many."""
        if self.now not in self._kept:
            self.turn("forward")
            self._engines.group.snapshot(_name(self.now)).create().result()
        self._used(self.now)
        for number in [each for each in self._kept if each > START][: -self._keep]:
            self._kept.remove(number)
            self._engines.group.snapshot(_name(number)).drop().result()

    def keep_loaded(self, number: int) -> None:
        """Keep a copy of a teacher's weights, or of those that the ranks start with."""
        if number not in self._kept:
            self.turn("forward")
            self._engines.group.snapshot(_name(number)).load(self._sources[number]).result()
            self._used(number)

    def _used(self, number: int) -> None:
        self._kept = [*(each for each in self._kept if each != number), number]

    def has(self, number: int) -> bool:
        """Whether a sampler of these weights can be answered anything."""
        return number in (self.now, *self._kept, *self._sources, *self._held)

    @property
    def _held(self) -> dict[int, int]:
        """The versions under which engines hold weights, by the numbers of these, in the same order."""
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
        number = self.now if sampler is None else self._number(sampler)
        if number not in self._held:
            copy = "" if sampler is None or number == self.now else self._copy(number, sampler)
            with self._losing(self._least_used()) as forget:
                version = self._engines.push(weights=copy, forget=next(iter(forget), None))
                with self._changing:
                    self._numbers = {**{each: held for held, each in self._held.items()}, version: number}
        if number == self.now:
            self._published = number

    def _least_used(self) -> tuple[int, ...]:
        """The version in whose place another one comes, if one has to go: rather one without samples in flight."""
        held, engines = tuple(self._held.values()), self._engines
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

    def _copy(self, number: int, sampler: Sampler) -> str:
        """The name of the ranks' copy of weights that are not those of now. Raises Refused if they have none."""
        if number in self._sources:
            self.keep_loaded(number)
        if number not in self._kept:
            raise Refused(
                f"the weights of {sampler.name} (version {number}) are gone: ranks hold version {self.now}, and copies "
                f"of {', '.join(map(str, sorted(self._kept))) or 'none'}; copies of {self._keep} are kept "
                "(serve.snapshots), and all go when ranks restart for another model"
            )
        self._used(number)
        return _name(number)

    # ---- samplers ----------------------------------------------------------------------------------------------------

    def add(self, number: int | None, name: str) -> str:
        """The id of a new sampler of these weights."""
        key = secrets.token_hex(8)  # in no other server's life, or a client of that would get other weights
        self._samplers[key] = Sampler(number=len(self._samplers), weights=number, name=name)
        return key

    def model_ends(self) -> None:
        """Inflight samplers stay at what their model has published last: others are published from now on."""
        for each in self._samplers.values():
            if each.weights is None:
                each.weights = self._published

    async def draw(self, wanted: Draw, params: SamplingParams, in_turn: InTurn) -> Drawn:
        """Sample, and score the prompt if that is asked for. Raises Refused where the sampler's weights are gone."""
        sampler = self._samplers.get(wanted.sampler)
        if sampler is None:
            raise Refused(f"there is no sampler {wanted.sampler}; the server may have started again since", status=404)
        scores = None
        if wanted.prompt_top:  # from the engines, and then all of the prompt's log-probs in this answer are
            last = len(wanted.prompt) if wanted.prompt_last is None else wanted.prompt_last
            params = evolve(params, scored=last, scored_top=wanted.prompt_top)
        elif wanted.prompt_logprobs:
            scores = await self._scored(sampler, wanted.prompt, in_turn)
            if wanted.prompt_last is not None:
                scores[: len(scores) - wanted.prompt_last] = np.nan
        request = _request(wanted, params, sampler)
        if scores is not None and params.max_tokens == 1 and sampler.weights not in (None, self.now, *self._held):
            # Who asks for log-probs of a prompt has to ask for a token too, which nobody reads.
            found = Generation.nothing(request)
        else:
            found = await self._sampled(_Asked(sampler, request), in_turn)
        parts, top = found.offsets[1:-1], None
        if found.scores is not None:
            first = found.scores.part(0, len(wanted.prompt))
            scores = first.logprobs if wanted.prompt_logprobs else None
            top = first.top_tokens, first.top_logprobs
        return Drawn(
            tokens=tuple(np.split(found.tokens, parts)),
            logprobs=tuple(np.split(found.logprobs, parts)),
            stopped=tuple(bool(each) for each in ~(found.truncated | found.unfinished)),
            prompt_logprobs=scores,
            prompt_top=top,
        )

    async def _sampled(self, asked: _Asked, in_turn: InTurn) -> Generation:
        for attempt in range(ATTEMPTS):
            try:
                begun = None if attempt else self._begin(asked)
                return await asyncio.wrap_future(begun or await self._begun_in_turn(asked, in_turn))
            except (EngineFailed, VersionGone):  # others start in the place of dead ones only by a push
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("every attempt returns or raises")

    def _begin(self, asked: _Asked) -> Samples | None:
        """The samples; None if engines do not hold the sampler's weights. Always of one version by its name: the newest
        one may be a copy's."""
        with self._changing:
            version = self._held.get(self._number(asked.sampler))
            if version is None or version in self._going:
                return None
            self._in_flight[version] += 1
            others = {each: number for each, number in self._numbers.items() if each != version}
            self._numbers = {**others, version: self._numbers[version]}
        try:
            work = self._engines.begin(evolve(asked.request, version=version))
        except BaseException:
            self._ended(version)
            raise
        work.add_done_callback(lambda _: self._ended(version))
        return work

    def _ended(self, version: int) -> None:
        with self._changing:
            self._in_flight[version] -= 1
            self._changing.notify_all()

    async def _begun_in_turn(self, asked: _Asked, in_turn: InTurn) -> Samples:
        """The same, once the weights have been pushed in the thread of the group: for all who wait for them by then."""
        wanted, asked.begun = asked.sampler.weights, None
        with self._changing:
            self._asked.setdefault(wanted, []).append(asked)

        def begin() -> Samples | None:
            if asked.begun is None:
                self.push(asked.sampler)
                with self._changing:
                    waiting = self._asked.pop(wanted, [asked])
                for each in waiting:
                    each.begun = self._begin(each)
            return asked.begun

        try:
            begun = await in_turn(begin)
        finally:
            with self._changing:
                if asked in (left := self._asked.get(wanted, [])):  # refused, or whoever asked has gone
                    left.remove(asked)
        if begun is None:  # an error of this request alone: what fails in turn is the end of the model
            raise EngineFailed("all engines died as soon as they had the weights")
        return begun

    def _number(self, sampler: Sampler) -> int:
        """Of the weights that a sampler is asked for now."""
        if sampler.weights is not None:
            return sampler.weights
        return self._published if self._published in self._held else self.now

    # ---- log-probs of prompts ----------------------------------------------------------------------------------------

    async def _scored(self, sampler: Sampler, tokens: IntArray, in_turn: InTurn) -> FloatArray:
        """[n] the log-probs of a prompt's tokens, NaN at the first."""
        prompt, number = _Prompt(tokens), self._number(sampler)
        with self._changing:
            self._waiting.setdefault(number, []).append(prompt)
        try:
            return await in_turn(lambda: self._score(number, prompt, sampler))
        finally:
            with self._changing:
                if prompt in (left := self._waiting.get(number, [])):  # whoever asked has gone
                    left.remove(prompt)

    def _score(self, number: int, prompt: _Prompt, sampler: Sampler) -> FloatArray:
        """In one pass with all prompts that wait for the same weights by now."""
        if prompt.logprobs is None:
            with self._changing:
                prompts = self._waiting.pop(number, [prompt])
            weights = "" if number == self.now else self._copy(number, sampler)
            self.turn("forward")
            for each, found in zip(prompts, self._pass([each.tokens for each in prompts], weights), strict=True):
                found[0] = np.nan
                each.logprobs = found
        assert prompt.logprobs is not None
        return prompt.logprobs

    def _pass(self, rows: Sequence[IntArray], weights: str) -> list[FloatArray]:
        offsets = offsets_of([len(row) for row in rows])
        tokens = np.concatenate(rows)
        mask = np.ones(len(tokens), np.bool_)
        mask[offsets[:-1]] = False
        samples = SampleBatch(tokens=tokens, offsets=offsets, columns={"loss_mask": mask})
        found = self._engines.group.forward(samples, Output.LOGPROBS, weights=weights).result()[Output.LOGPROBS]
        return [row.copy() for row in np.split(found, offsets[1:-1])]


def _name(number: int) -> str:
    """Of the ranks' copy of these weights."""
    return f"weights-{number}"


def _request(wanted: Draw, params: SamplingParams, sampler: Sampler) -> GenerateRequest:
    """Rows whose noise follows from the seed or, without one, from the sampler and the request's number."""
    origin = (sampler.number, wanted.key) if wanted.seed is None else (wanted.seed % 2**63,)
    return GenerateRequest(
        tokens=np.tile(wanted.prompt, wanted.samples),
        offsets=offsets_of([len(wanted.prompt)] * wanted.samples),
        noise_keys=np.array([hash_key(*origin, sample) for sample in range(wanted.samples)]),
        params=params,
    )
