"""Play a batch of episodes side by side, and answer what they ask of the policy together."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, evolve, field, frozen

from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt
from corerl.rollout.conversation import Asked, Conversation, Refused, Renderer
from corerl.rollout.engine import GenerateRequest, Generation, SamplingParams
from corerl.rollout.episodes import Episode, EpisodeFunction
from corerl.rollout.fleet import NoneLeft
from corerl.rollout.front import ChatAnswer, ChatRequest, Front
from corerl.rollout.partial import split
from corerl.rollout.rewards import Failure
from corerl.rollout.sampler import Rollout, Sampler, require_finished, rows_of, stop_token
from corerl.types import Array, IntArray, Output, SampleBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUIET = 0.05  # seconds without another request after which those that wait are answered
GATHER = 0.5  # seconds that a request waits for others at most


class EpisodeSampler(Sampler):
    """A sampler whose samples are played by a function, each as one conversation.

    A conversation is drawn as one long response, in which an environment's tokens stand between the policy's: its noise
    is that of the sample, token by token, so that neither the time that anything takes nor what is drawn together
    changes what is drawn. `rollout.max_tokens` bounds all that follows the first request, the environment's tokens too.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        generate: Callable[[GenerateRequest], Generation],
        seed: int,
        function: EpisodeFunction,
        front: Front,
        config: EpisodesConfig,
        aside: Callable[[GenerateRequest], Generation] | None = None,
        calls: int = 1,
    ) -> None:
        """`aside` is `generate` for other threads: it raises NoneLeft where no engine is left, and is asked by as many
        as `calls` of them, so that a long answer holds up nobody else's. Without it engines are asked in turn."""
        super().__init__(tokenizer=tokenizer, generate=generate, seed=seed)
        self._aside = aside
        self._calls = calls
        self._function = function
        self._front = front
        self._config = config

    def sample(
        self, prompts: Sequence[Prompt], *, rollout_step: int, samples: int, params: SamplingParams, attempt: int = 0
    ) -> Rollout:
        """As every sampler's; in the thread that calls it engines are asked, and functions run in others. A function
        that fails is in the rollout's `outcomes`, with what was sampled until then."""
        request = self.request(prompts, rollout_step=rollout_step, samples=samples, params=params, attempt=attempt)
        group, sample = rows_of(len(prompts), samples)
        seats = [
            Seat(number=number, prompt=prompts[index], key=int(key))
            for number, (index, key) in enumerate(zip(group, request.noise_keys, strict=True))
        ]
        Play(
            seats,
            front=self._front,
            tokenizer=self._tokenizer,
            generate=self._generate,
            params=params,
            function=self._function,
            config=self._config,
            aside=self._aside if self._calls > 1 else None,
            calls=self._calls,
        ).run()
        return Rollout(
            batch=_batch(seats, request.split(), params.temperature).with_rows(group=group, sample=sample),
            prompts=tuple(prompts),
            texts=[seat.conversation.text for seat in seats],
            outcomes=[seat.outcome for seat in seats],
        )


@frozen(kw_only=True, eq=False)
class Turn:
    """A request that waits for its answer."""

    asked: Asked
    request: GenerateRequest  # of one row
    answer: Future[tuple[str, Generation]] = field(factory=Future)


@define(kw_only=True, eq=False)
class Seat:
    """One episode of a batch, as far as it is played."""

    number: int  # in the batch
    prompt: Prompt
    key: int  # of its noise
    conversation: Conversation = field(factory=Conversation)
    truncated: bool = False  # rollout.max_tokens has ended it, or would have
    outcome: float | Failure | None = None
    # While it is played:
    ended: bool = False
    deadline: float = 0.0
    base_url: str = ""
    turn: Turn | None = None  # that waits
    told_full: bool = False  # that there is no room for another answer


Turns = list[tuple[Seat, Turn]]


class Play:
    """The episodes of one batch: as many side by side as the config allows, their requests answered together.

    Each function runs in a thread of its own, and each request in one of the server's. Whoever calls `run` asks the
    engines, or, where they answer several calls side by side, has threads ask them `aside`. What all of them share
    changes under `_state`.
    """

    def __init__(
        self,
        seats: Iterable[Seat],
        *,
        front: Front,
        tokenizer: PreTrainedTokenizerBase,
        generate: Callable[[GenerateRequest], Generation],
        params: SamplingParams,
        function: EpisodeFunction,
        config: EpisodesConfig,
        aside: Callable[[GenerateRequest], Generation] | None = None,
        calls: int = 1,
    ) -> None:
        self._front = front
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._generate = generate
        self._params = params
        self._function = function
        self._config = config
        self._state = threading.Condition()
        self._to_begin = iter(seats)
        self._playing: dict[int, Seat] = {}  # by identity, the oldest first
        self._waiting: list[Seat] = []  # whose turns no engine has been asked for
        self._first, self._last = 0.0, 0.0  # when the first and the last of these came
        self._gathered: deque[Turns] = deque()  # to be asked for, each in one call
        self._aside = aside
        self._calls = calls
        self._calling = 0  # in threads of their own
        self._failure: BaseException | None = None  # of one of these

    def run(self) -> None:
        """Until all episodes have ended. Raises what `generate` raises; then nothing is answered any more."""
        try:
            while turns := self._next():
                if self._aside is None:
                    self._ask(self._generate, turns)
                    continue
                with self._state:
                    self._calling += 1
                work = functools.partial(self._ask_aside, self._aside, turns)
                threading.Thread(target=work, name="rollout call", daemon=True).start()
        finally:
            with self._state:
                for seat in list(self._playing.values()):
                    self._end(seat, None)

    # ---- in the thread that calls `run` -----------------------------------------------------------------------------

    def _next(self) -> Turns:
        """What engines are asked for next: the requests of all that are being played, or of those that ask soon.
        Nothing once all have ended."""
        with self._state:
            while True:
                if self._failure is not None:
                    raise self._failure
                now = time.monotonic()
                self._give_up(now)
                self._begin(now)
                until = self._gather(now)
                if self._gathered and self._calling < self._calls:
                    return self._gathered.popleft()
                if not self._playing and not self._calling:
                    return []
                self._state.wait(None if until is None else until - now)

    def _gather(self, now: float) -> float | None:
        """Where it is time for it and engines are free, what waits is to be asked for. When to look again."""
        until = [seat.deadline for seat in itertools.islice(self._playing.values(), 1)]
        if self._waiting and self._calling < self._calls:
            ready = min(self._first + GATHER, self._last + QUIET)
            if self._all_wait or now >= ready:
                alike: dict[SamplingParams, Turns] = {}
                # In the batch's order, not in that of their coming: engines round otherwise where rows lie otherwise.
                for seat in sorted(self._waiting, key=lambda each: each.number):
                    assert seat.turn is not None
                    alike.setdefault(seat.turn.request.params, []).append((seat, seat.turn))
                self._gathered.extend(alike.values())
                self._waiting = []
            else:
                until.append(ready)
        return min(until, default=None)

    @property
    def _all_wait(self) -> bool:
        return all(seat.turn is not None for seat in self._playing.values())

    def _begin(self, now: float) -> None:
        for seat in itertools.islice(self._to_begin, self._config.concurrency - len(self._playing)):
            seat.deadline = now + self._config.timeout
            seat.base_url = self._front.open(functools.partial(self._answer, seat))
            self._playing[id(seat)] = seat
            threading.Thread(target=self._play, args=(seat,), name="rollout episode", daemon=True).start()

    def _give_up(self, now: float) -> None:
        late = f"took longer than rollout.episodes.timeout={self._config.timeout:g} seconds"
        for seat in [each for each in self._playing.values() if each.deadline <= now]:
            self._end(seat, self._function.failure("timeout", late, seat.prompt))

    def _ask(self, generate: Callable[[GenerateRequest], Generation], turns: Turns) -> None:
        requests = [turn.request for _, turn in turns]
        generation = generate(GenerateRequest.concatenate(requests))
        require_finished(generation)
        for (seat, turn), drawn in zip(turns, split(generation, requests), strict=True):
            self._tell(seat, turn, drawn)

    def _tell(self, seat: Seat, turn: Turn, drawn: Generation) -> None:
        """The answer becomes part of the conversation, unless its episode has ended meanwhile."""
        text = self._renderer.text(drawn.tokens, turn.request.params.stop_tokens)
        with self._state:
            if seat.ended:
                return
            seat.conversation = seat.conversation.answered(turn.asked, text, drawn)
            seat.truncated = bool(drawn.truncated[0]) and seat.conversation.begun >= self._params.max_tokens
            seat.turn = None
        turn.answer.set_result((text, drawn))

    # ---- in threads of their own ------------------------------------------------------------------------------------

    def _ask_aside(self, generate: Callable[[GenerateRequest], Generation], turns: Turns) -> None:
        try:
            self._ask(generate, turns)
        except NoneLeft:  # who calls `run` may begin new engines, and asks by itself from now on
            with self._state:
                self._aside = None
                self._gathered.appendleft(turns)
        except BaseException as error:
            with self._state:
                self._failure = self._failure or error
        finally:
            with self._state:
                self._calling -= 1
                self._state.notify_all()

    def _play(self, seat: Seat) -> None:
        episode = Episode(prompt=seat.prompt, base_url=seat.base_url, client=self._front.client)
        outcome = self._function.play(episode, self._config.timeout)
        with self._state:
            if not seat.conversation.turns and not isinstance(outcome, Failure):
                outcome = self._function.failure("silent", "asked the policy for nothing", seat.prompt)
            self._end(seat, outcome)

    def _answer(self, seat: Seat, request: ChatRequest) -> ChatAnswer:
        conversation = seat.conversation
        asked = self._renderer.ask(conversation, request.messages, request.tools)
        tokens = np.concatenate([conversation.tokens, asked.tokens])
        begun = len(tokens) - (conversation.prompt_length or len(asked.tokens))
        if begun >= self._params.max_tokens:
            return self._no_room(seat, len(tokens))
        turn = Turn(asked=asked, request=self._request(seat, tokens, begun, request))
        with self._state:
            if seat.ended:
                raise _over()
            if seat.turn is not None or seat.conversation is not conversation:
                raise Refused("another request of this episode is being answered; ask one after the other")
            seat.turn = turn
            self._last = time.monotonic()
            if not self._waiting:
                self._first = self._last
            self._waiting.append(seat)
            if len(self._waiting) == 1 or self._all_wait:  # the others change nothing for who gathers them
                self._state.notify_all()
        text, drawn = turn.answer.result()
        return ChatAnswer(
            text=text,
            finish_reason="length" if drawn.truncated[0] else "stop",
            prompt_tokens=len(tokens),
            tokens=self._tokenizer.convert_ids_to_tokens(drawn.tokens.tolist()),
            logprobs=drawn.logprobs.tolist(),
        )

    def _request(self, seat: Seat, tokens: IntArray, begun: int, request: ChatRequest) -> GenerateRequest:
        """The next part of the episode's one response."""
        params = self._params
        try:
            stops = [stop_token(text, self._tokenizer) for text in request.stop]
        except ValueError as error:
            raise Refused(f"stop: {error}") from error
        if stops:
            params = evolve(params, stop_tokens=tuple(dict.fromkeys([*params.stop_tokens, *stops])))
        if request.max_tokens is not None:
            params = evolve(params, max_tokens=min(begun + request.max_tokens, params.max_tokens))
        return GenerateRequest(
            tokens=tokens,
            offsets=np.array([0, len(tokens)]),
            noise_keys=np.array([seat.key]),
            params=params,
            begun=np.array([begun]),
        )

    def _no_room(self, seat: Seat, prompt_tokens: int) -> ChatAnswer:
        """An empty answer, cut before its first token; but to a function that goes on after it."""
        with self._state:
            if seat.told_full:
                raise Refused(
                    f"the episode has used up its rollout.max_tokens={self._params.max_tokens}; end it where an answer "
                    "has finish_reason='length'",
                    code="context_length_exceeded",
                )
            seat.truncated = seat.told_full = True
        return ChatAnswer(text="", finish_reason="length", prompt_tokens=prompt_tokens, tokens=(), logprobs=())

    # ---- in any thread, under `_state` ------------------------------------------------------------------------------

    def _end(self, seat: Seat, outcome: float | Failure | None) -> None:
        """Once; what it asks for from now on is refused."""
        if seat.ended:
            return
        seat.ended, seat.outcome = True, outcome
        self._front.shut(seat.base_url)
        del self._playing[id(seat)]
        if seat.turn is not None:
            self._waiting = [each for each in self._waiting if each is not seat]
            seat.turn.answer.set_exception(_over())
        self._state.notify_all()


def _over() -> Refused:
    return Refused("the episode is over, and nothing is served for it any more", status=410, code="episode_over")


def _batch(seats: Sequence[Seat], prompts: Sequence[IntArray], temperature: float) -> SampleBatch:
    """All conversations; where nothing was asked, the prompt [L] alone."""
    played = [
        seat.conversation if seat.conversation.turns else Conversation.unanswered(prompt)
        for seat, prompt in zip(seats, prompts, strict=True)
    ]
    lengths = np.array([len(each.tokens) for each in played])
    columns: dict[str, Array] = {
        "loss_mask": np.concatenate([each.loss_mask for each in played]),
        "rollout_logprobs": np.concatenate([each.logprobs for each in played]),
        "versions": np.concatenate([each.versions for each in played]),
    }
    if (shape := next((each.routed_experts for each in played if each.routed_experts is not None), None)) is not None:
        columns[Output.ROUTED_EXPERTS.value] = np.concatenate(
            [
                np.full((len(each.tokens), *shape.shape[1:]), -1, shape.dtype)
                if each.routed_experts is None
                else each.routed_experts
                for each in played
            ]
        )
    prompt_length = np.array([each.prompt_length for each in played])
    return SampleBatch(
        tokens=np.concatenate([each.tokens for each in played]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        columns=columns,
        rows={
            "prompt_length": prompt_length,
            "response_length": lengths - prompt_length,
            "truncated": np.array([seat.truncated for seat in seats], dtype=np.bool_),
            "turns": np.array([each.turns for each in played]),
        },
        temperature=temperature,
    )
