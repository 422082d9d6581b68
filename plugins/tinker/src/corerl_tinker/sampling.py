"""Samplers: each is bound to the weights that it was made of, and answers with these or not at all.

Weights have numbers: 0 are those that the ranks start with, each change gives others, and teachers have some below 0.
Engines hold those that were pushed last; of some earlier ones, and of teachers, ranks keep a copy, under which prompts
still get their log-probs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from attrs import define, frozen

from corerl import Engines, Output, SampleBatch
from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl.errors import EngineFailed
from corerl.ops import hash_key
from corerl.types import FloatArray, IntArray, offsets_of
from corerl_tinker.requests import Draw, Drawn, InTurn, Refused

START = 0  # the weights that the ranks start with
LONGEST_WAIT = 600.0  # seconds for samples in flight, before the weights that they are sampled from go


@frozen(kw_only=True)
class Sampler:
    """What a client samples from."""

    number: int  # of the sampler, the same each time a client does the same
    weights: int | None  # their number; None: those that were pushed last, whatever these are
    name: str  # for messages


@define(eq=False)
class _Prompt:
    """A prompt that waits for its log-probs [n]."""

    tokens: IntArray
    logprobs: FloatArray | None = None


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
        self._pushed: tuple[int, int] | None = None  # the number of what engines hold, and their own version of it
        self._open = False  # whether engines are awake and keep what they hold
        self._in_flight = 0
        self._waiting: dict[int, list[_Prompt]] = {}  # by weights

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
        return number in (self.now, *self._kept, *self._sources, self._pushed and self._pushed[0])

    def turn(self, stage: Literal["train", "forward", "save"]) -> None:
        """Before ranks do such work. Where they share devices with engines, these finish what they are at and sleep."""
        if self._engines.takes_turns:
            self._close()
        self._engines.turn(stage)

    def push(self) -> None:
        """Let engines hold the weights as they are."""
        if self._open and self._pushed is not None and self._pushed[0] == self.now:
            return
        self._close()
        version = self._engines.push()
        with self._changing:
            self._pushed, self._open = (self.now, version), True

    def _close(self) -> None:
        """Begin no samples, and wait for those in flight: they are of the weights that engines hold."""
        with self._changing:
            if self._open:  # else that was waited for, and what goes on waits for the next push
                self._open = False
                self._changing.wait_for(lambda: not self._in_flight, LONGEST_WAIT)

    # ---- samplers ----------------------------------------------------------------------------------------------------

    def add(self, number: int | None, name: str) -> str:
        """The id of a new sampler of these weights."""
        key = secrets.token_hex(8)  # in no other server's life, or a client of that would get other weights
        self._samplers[key] = Sampler(number=len(self._samplers), weights=number, name=name)
        return key

    async def draw(self, wanted: Draw, params: SamplingParams, in_turn: InTurn) -> Drawn:
        """Sample, and score the prompt if that is asked for. Raises Refused where the sampler's weights are gone."""
        sampler = self._samplers.get(wanted.sampler)
        if sampler is None:
            raise Refused(f"there is no sampler {wanted.sampler}; the server may have started again since", status=404)
        scores = await self._scored(sampler, wanted.prompt, in_turn) if wanted.prompt_logprobs else None
        try:
            found = await self._sampled(sampler, _request(wanted, params, sampler), in_turn)
        except Refused:
            if scores is None or params.max_tokens > 1:
                raise
            # Who asks for log-probs of a prompt has to ask for a token too, which nobody reads.
            found = Generation.nothing(_request(wanted, params, sampler))
        parts = found.offsets[1:-1]
        return Drawn(
            tokens=tuple(np.split(found.tokens, parts)),
            logprobs=tuple(np.split(found.logprobs, parts)),
            stopped=tuple(bool(each) for each in ~(found.truncated | found.unfinished)),
            prompt_logprobs=scores,
        )

    async def _sampled(self, sampler: Sampler, request: GenerateRequest, in_turn: InTurn) -> Generation:
        begun = self._begin(sampler, request)
        if begun is None:
            begun = await in_turn(lambda: self._begin_in_turn(sampler, request))
        work, version = begun
        try:
            generation = await asyncio.wrap_future(work)
        except EngineFailed:  # all have died, and others get what they held only by a push
            died = version
            work, version = await in_turn(lambda: self._begin_in_turn(sampler, request, died=died))
            generation = await asyncio.wrap_future(work)
        if sampler.weights is not None and (generation.versions != version).any():
            raise Refused(f"the weights of {sampler.name} went while this was sampled; {self._instead(sampler)}")
        return generation

    def _begin(
        self, sampler: Sampler, request: GenerateRequest
    ) -> tuple[concurrent.futures.Future[Generation], int] | None:
        """The samples, and the version that they are of; None if engines do not hold the sampler's weights."""
        with self._changing:
            if not self._open or self._pushed is None or sampler.weights not in (None, self._pushed[0]):
                return None
            self._in_flight += 1
            version = self._pushed[1]
        try:
            work = self._engines.begin(request)
        except BaseException:
            self._ended()
            raise
        work.add_done_callback(self._ended)
        return work, version

    def _ended(self, work: object = None) -> None:
        with self._changing:
            self._in_flight -= 1
            self._changing.notify_all()

    def _begin_in_turn(
        self, sampler: Sampler, request: GenerateRequest, *, died: int | None = None
    ) -> tuple[concurrent.futures.Future[Generation], int]:
        """The same in the thread of the group, which can push. `died`: the version with which engines have died; the
        first who finds out pushes, for all others."""
        if self._pushed is not None and self._pushed[1] == died:
            self._close()
        if sampler.weights == self.now or (sampler.weights is None and not self._open):
            self.push()
        begun = self._begin(sampler, request)
        if begun is None:
            raise Refused(f"{sampler.name} cannot be sampled from any more; {self._instead(sampler)}")
        return begun

    def _instead(self, sampler: Sampler) -> str:
        held = "none" if self._pushed is None else f"those of version {self._pushed[0]}"
        return (
            f"its weights are version {sampler.weights}, engines hold {held}, and ranks version {self.now}: engines "
            "serve one version at a time. Sample before others are published, or from a sampler of the newest weights; "
            "log-probs of prompts (compute_logprobs) are served for earlier ones too"
        )

    # ---- log-probs of prompts ----------------------------------------------------------------------------------------

    async def _scored(self, sampler: Sampler, tokens: IntArray, in_turn: InTurn) -> FloatArray:
        """[n] the log-probs of a prompt's tokens, NaN at the first."""
        prompt, number = _Prompt(tokens), sampler.weights
        if number is None:
            number = self.now if self._pushed is None else self._pushed[0]
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
            if number != self.now and number in self._sources:
                self.keep_loaded(number)
            if number != self.now and number not in self._kept:
                raise Refused(
                    f"the weights of {sampler.name} (version {number}) are gone: ranks hold version {self.now}, and "
                    f"copies of {', '.join(map(str, sorted(self._kept))) or 'none'}; copies of {self._keep} are kept "
                    "(serve.snapshots), and all go when ranks restart for another model"
                )
            self.turn("forward")
            for each, found in zip(prompts, self._pass([each.tokens for each in prompts], number), strict=True):
                found[0] = np.nan
                each.logprobs = found
        assert prompt.logprobs is not None
        return prompt.logprobs

    def _pass(self, rows: Sequence[IntArray], number: int) -> list[FloatArray]:
        offsets = offsets_of([len(row) for row in rows])
        tokens = np.concatenate(rows)
        mask = np.ones(len(tokens), np.bool_)
        mask[offsets[:-1]] = False
        samples = SampleBatch(tokens=tokens, offsets=offsets, columns={"loss_mask": mask})
        weights = ""
        if number != self.now:
            weights = _name(number)
            self._used(number)
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
