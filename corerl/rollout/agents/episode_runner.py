"""Play episodes concurrently: functions and requests run in threads, and requests to the policy are batched."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field, frozen

from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt
from corerl.engines.base import UNLIMITED, GenerateRequest, Generation, SamplingParams
from corerl.engines.stops import stops_of
from corerl.event_loop import in_thread
from corerl.rollout.agents.chat_requests import ChatRequest
from corerl.rollout.agents.chat_server import ChatAnswer, ChatServer
from corerl.rollout.agents.conversation import Answer, Asked, Conversation, Refused, Renderer
from corerl.rollout.agents.episodes import Episode, EpisodeFunction
from corerl.rollout.agents.tool_calls import format_of
from corerl.rollout.rewards.base import Failure
from corerl.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUIET = 0.05  # seconds without a new request after which the waiting ones are sent
GATHER = 0.5  # maximum seconds that a request waits for others


@frozen(kw_only=True, eq=False)
class Turn:
    """One chat request of an episode, and its future answer."""

    chat: ChatRequest
    asked: Asked
    request: GenerateRequest  # one row
    answer: Future[tuple[Answer, Generation]] = field(factory=Future)


@define(kw_only=True, eq=False)
class EpisodeState:
    """One episode and its state."""

    number: int  # episodes start, and are batched, in this order
    group: int  # index of its prompt's group of samples
    prompt: Prompt
    key: int  # noise key
    conversation: Conversation = field(factory=Conversation)
    truncated: bool = False  # rollout.max_tokens cut it, or left no room
    outcome: float | Failure | None = None
    ended: bool = False
    # While it is being played:
    deadline: float = 0.0
    base_url: str = ""
    turn: Turn | None = None  # the one waiting for an answer
    answered: Turn | None = None  # the last answered one
    refusal: str = ""  # why its last request was refused, until another one is answered
    told_full: bool = False  # the function was told that no room is left


Turns = list[tuple[EpisodeState, Turn]]


class EpisodeRunner:
    """Plays episodes, as many at once as the config allows.

    Each function runs in its own thread, each request in one of the server's. The caller, which has engines sample,
    waits on `state`, calls `look` at each change, and `tell` with what was drawn. Shared state changes under `state`.
    """

    def __init__(
        self,
        *,
        front: ChatServer,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        function: EpisodeFunction,
        config: EpisodesConfig,
        state: threading.Condition,
        longest_prompt: int = UNLIMITED,
        template_options: Mapping[str, Any] | None = None,
        special_tokens: bool = False,
    ) -> None:
        """`longest_prompt`: tokens that an episode's first request may have."""
        self._front = front
        self._tokenizer = tokenizer
        self._renderer = Renderer(
            tokenizer,
            format_of(config.tool_calls, tokenizer.chat_template),
            template_options,
            special_tokens=special_tokens,
            unshown_tools=config.tool_calls != "auto",
        )
        self._params = params
        self._function = function
        self._config = config
        self._state = state
        self._longest_prompt = longest_prompt
        self._stops: dict[tuple[str, ...], tuple[list[int], list[str]]] = {}  # by the texts of a request
        self._to_begin: deque[EpisodeState] = deque()
        self._playing: dict[int, EpisodeState] = {}  # by id(), oldest first
        self._waiting: list[EpisodeState] = []  # players whose turns `look` has not returned yet
        self._first, self._last = 0.0, 0.0  # when the first and the last of these arrived

    # ---- for the caller that has engines sample ---------------------------------------------------------------------

    def admit(self, players: Iterable[EpisodeState]) -> None:
        """Queue these players to start as soon as there is room."""
        with self._state:
            self._to_begin.extend(players)
            self._state.notify_all()

    @property
    def over(self) -> bool:
        """Whether all episodes have ended."""
        return not self._playing and not self._to_begin

    def look(self, *, free: bool = True, gather: bool = True) -> tuple[list[Turns], float | None]:
        """End late episodes, start queued ones, and return the waiting requests if engines are `free`, in lists of
        equal parameters. With `gather`, requests are held back until every running episode waits or none has asked for
        a while. Also returns the seconds until the next look is due; None if only a change can bring anything."""
        with self._state:
            now = time.monotonic()
            self._give_up(now)
            self._begin(now)
            until = [player.deadline for player in itertools.islice(self._playing.values(), 1)]
            gathered: list[Turns] = []
            if self._waiting and free:
                ready = min(self._first + GATHER, self._last + QUIET)
                if not gather or self._all_wait or now >= ready:
                    gathered = self._gathered()
                else:
                    until.append(ready)
            return gathered, min(until) - now if until else None

    def tell(self, player: EpisodeState, turn: Turn, drawn: Generation) -> None:
        """Deliver what was drawn: it becomes part of the conversation, unless the episode has ended meanwhile."""
        answer = self._renderer.answer(turn.asked, drawn.tokens, turn.request.params)
        with self._state:
            if player.ended:
                return
            player.conversation = player.conversation.answered(turn.asked, answer, drawn)
            player.truncated = bool(drawn.truncated[0]) and player.conversation.begun >= self._params.max_tokens
            player.turn, player.answered, player.refusal = None, turn, ""
        turn.answer.set_result((answer, drawn))

    def end(self, players: Iterable[EpisodeState]) -> None:
        """End players that have not ended, whether started or not, without an outcome."""
        with self._state:
            for player in players:
                self._end(player, None)

    def close(self) -> None:
        """End all episodes; no further request is answered."""
        with self._state:
            self.end([*self._playing.values(), *self._to_begin])

    # ---- in any thread, under `state` -------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        while self._to_begin and len(self._playing) < self._config.concurrency:
            player = self._to_begin.popleft()
            if player.ended:
                continue
            player.deadline = now + self._config.timeout
            player.base_url = self._front.open(
                functools.partial(self._answer_in_thread, player), functools.partial(setattr, player, "refusal")
            )
            self._playing[id(player)] = player
            threading.Thread(target=self._play, args=(player,), name="rollout episode", daemon=True).start()

    def _give_up(self, now: float) -> None:
        for player in [each for each in self._playing.values() if each.deadline <= now]:
            self._end(player, self._function.late(self._config.timeout, player.prompt))

    @property
    def _all_wait(self) -> bool:
        return all(player.turn is not None for player in self._playing.values())

    def _gathered(self) -> list[Turns]:
        alike: dict[SamplingParams, Turns] = {}
        # By number, not by arrival: an engine's rounding depends on the order of rows.
        for player in sorted(self._waiting, key=lambda each: each.number):
            assert player.turn is not None
            alike.setdefault(player.turn.request.params, []).append((player, player.turn))
        self._waiting = []
        return list(alike.values())

    def _end(self, player: EpisodeState, outcome: float | Failure | None) -> None:
        """End an episode, once; its further requests are refused."""
        if player.ended:
            return
        player.ended, player.outcome = True, outcome
        if self._playing.pop(id(player), None):
            self._front.shut(player.base_url)
        if player.turn is not None:
            self._waiting = [each for each in self._waiting if each is not player]
            player.turn.answer.set_exception(_over())
        self._state.notify_all()

    # ---- in threads of their own -------------------------------------------------------------------------------------

    def _play(self, player: EpisodeState) -> None:
        episode = Episode(prompt=player.prompt, base_url=player.base_url, server=self._front)
        outcome = self._function.play(episode, self._config.timeout)
        # A client's own error seldom says more than the status.
        if isinstance(outcome, Failure) and player.refusal and player.refusal not in outcome.message:
            outcome = evolve(outcome, message=f"{outcome.message}; its last request was refused: {player.refusal}")
        with self._state:
            if not player.conversation.turns and not isinstance(outcome, Failure):
                outcome = self._function.failure("silent", "sent no request to the policy", player.prompt)
            self._end(player, outcome)

    async def _answer_in_thread(self, player: EpisodeState, request: ChatRequest) -> ChatAnswer:
        return await in_thread(lambda: self._answer(player, request), name="rollout request")

    def _answer(self, player: EpisodeState, request: ChatRequest) -> ChatAnswer:
        with self._state:
            conversation, turn = player.conversation, _turn_of(player, request)
        if turn is not None:
            return self._told(turn)
        asked = self._renderer.ask(
            conversation,
            request.messages,
            request.tools,
            most_calls=request.most_calls,
            options=request.template_options,
        )
        if not conversation.turns and len(asked.tokens) > self._longest_prompt:
            raise Refused(
                f"messages: the episode's first request has {len(asked.tokens)} tokens, but only "
                f"{self._longest_prompt} fit into rollout.context_length besides rollout.max_tokens="
                f"{self._params.max_tokens}; shorten it",
                code="context_length_exceeded",
            )
        tokens = np.concatenate([conversation.tokens, asked.tokens])
        begun = len(tokens) - (conversation.prompt_length or len(asked.tokens))
        if begun >= self._params.max_tokens:
            return self._no_room(player, tokens)
        turn = Turn(chat=request, asked=asked, request=self._request(player, tokens, begun, request))
        with self._state:
            if player.ended:
                raise _over()
            if (same := _turn_of(player, request)) is not None:
                turn = same
            elif player.turn is not None or player.conversation is not conversation:
                raise Refused("another request of this episode is still being answered; send one at a time")
            else:
                self._wait(player, turn)
        return self._told(turn)

    def _wait(self, player: EpisodeState, turn: Turn) -> None:
        """Queue the turn. Called under `state`."""
        player.turn = turn
        self._last = time.monotonic()
        if not self._waiting:
            self._first = self._last
        self._waiting.append(player)
        if len(self._waiting) == 1 or self._all_wait:  # other arrivals change nothing for the gathering thread
            self._state.notify_all()

    def _told(self, turn: Turn) -> ChatAnswer:
        """Wait for the turn's answer."""
        answer, drawn = turn.answer.result()
        return ChatAnswer(
            text=answer.content,
            tool_calls=answer.calls,
            finish_reason="length" if drawn.truncated[0] else "tool_calls" if answer.calls else "stop",
            prompt_token_ids=turn.request.tokens,
            token_ids=drawn.tokens,
            # The vocabulary may be larger than the tokenizer's.
            tokens=[token or "" for token in self._tokenizer.convert_ids_to_tokens(drawn.tokens.tolist())],
            logprobs=drawn.logprobs.tolist(),
        )

    def _request(self, player: EpisodeState, tokens: IntArray, begun: int, request: ChatRequest) -> GenerateRequest:
        """The engine request for the next part of the episode's one response."""
        params = self._params
        try:
            ends, texts = self._stops_of(request.stop)
        except ValueError as error:
            raise Refused(f"stop: {error}") from error
        if request.stop:
            params = evolve(
                params,
                stop_tokens=tuple(dict.fromkeys([*params.stop_tokens, *ends])),
                stop=tuple(dict.fromkeys([*params.stop, *texts])),
            )
        # As a row's limit, not in `params`: rows with different limits can be drawn together.
        limit = min(begun + (request.max_tokens or params.max_tokens), params.max_tokens)
        return GenerateRequest(
            tokens=tokens,
            offsets=np.array([0, len(tokens)]),
            noise_keys=np.array([player.key]),
            params=params,
            begun=np.array([begun]),
            answered=np.array([0]),
            limits=np.array([limit]),
        )

    def _stops_of(self, stop: Sequence[str]) -> tuple[list[int], list[str]]:
        """`stops_of`, which searches the vocabulary, once for each list of texts."""
        known = tuple(stop)
        if known not in self._stops:
            self._stops[known] = stops_of(known, self._tokenizer)
        return self._stops[known]

    def _no_room(self, player: EpisodeState, prompt: IntArray) -> ChatAnswer:
        """An empty answer, cut before its first token; Refused if the function asks once more after it."""
        with self._state:
            if player.told_full:
                raise Refused(
                    f"the episode has used up its rollout.max_tokens={self._params.max_tokens}; end it when an answer "
                    "has finish_reason='length'",
                    code="context_length_exceeded",
                )
            player.truncated = player.told_full = True
        return ChatAnswer(text="", finish_reason="length", prompt_token_ids=prompt)


def _turn_of(player: EpisodeState, request: ChatRequest) -> Turn | None:
    """The waiting turn, or else the last answered one, if its request is the same: clients resend a request whose
    answer is late, and sampling it again would give the same answer."""
    latest = player.turn or player.answered
    return latest if latest is not None and latest.chat == request else None


def _over() -> Refused:
    return Refused("the episode is over; its requests are no longer answered", status=410, code="episode_over")
