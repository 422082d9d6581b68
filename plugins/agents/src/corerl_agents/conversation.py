"""A conversation as tokens: a request appends those of its messages, and those that were sampled stay as they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import Factory, field, frozen

from corerl.engines import GenerateRequest, Generation
from corerl.messages import short_repr
from corerl.pictures import Picture
from corerl.types import Array, BoolArray, FloatArray, IntArray, all_shown
from corerl_agents.refused import SHOWN
from corerl_agents.tool_calls import normalized

Message = Mapping[str, Any]
TEXTS = ("content", "reasoning_content", "reasoning")  # fields of an answer; servers have both names of the latter


def _empty(dtype: type) -> Any:
    return field(factory=lambda: np.zeros(0, dtype=dtype))


@frozen(kw_only=True)
class Answer:
    """One answer of the policy."""

    text: str  # the whole answer with the reasoning tag that the chat template opens, for the reward
    content: str  # without special tokens and tool calls, for the client
    calls: tuple[Mapping[str, Any], ...] = ()  # tool calls in the shape of OpenAI's `message.tool_calls`
    reasoning: str = ""  # for the client, where it is not in the content
    parts: tuple[str, str] = field(default=("", ""), eq=False)  # reasoning and rest, as clients may send them back
    opened: str = ""  # the reasoning tag with which `text` begins

    @property
    def message(self) -> dict[str, Any]:
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        calls = {"tool_calls": list(self.calls)} if self.calls else {}
        return {"role": "assistant", "content": self.content, **reasoning, **calls}


@frozen(kw_only=True, eq=False)
class Exchange:
    """A request's new tokens, and the answer that was sampled behind them."""

    asked: IntArray  # [n]
    tokens: IntArray  # [m] of the answer
    logprobs: FloatArray  # [m]
    versions: IntArray  # [m]
    engines: Array  # [m] int16
    experts: Array | None = None  # [n + m, MoE layers, experts per token] if the engine reports them
    # Those of earlier tokens that nobody knew until the pass that read these: places [k] in the row, and experts [k].
    earlier: IntArray = _empty(np.int64)
    learned: Array | None = None
    picture: IntArray = _empty(np.int32)  # [n] of `asked`: 1 + the index in `pictures`, 0 for text
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.asked) + len(self.tokens)


@frozen(kw_only=True, eq=False)
class Row:
    """A conversation as it is trained on."""

    tokens: IntArray  # [n]
    loss_mask: BoolArray  # [n] True where sampled, unless another row is trained on that token
    logprobs: FloatArray  # [n] 0.0 outside the loss mask
    versions: IntArray  # [n] 0 outside the loss mask
    engines: Array  # [n] int16, of the engine that sampled each token; 0 outside the loss mask
    turn_rewards: FloatArray  # [n] at the last token of each answer that this row is trained on, 0 elsewhere
    routed_experts: Array | None = None  # [n, MoE layers, experts per token] if the engine reports them
    prompt_length: int  # tokens of the first request
    turns: int  # answers that this row is trained on
    text: str  # of the last answer
    truncated: bool  # rollout.max_tokens cut the last answer, or left no room for another
    final: bool  # the last answer is the episode's last one
    picture: IntArray  # [n] 1 + the index in `pictures`, 0 for text
    pictures: tuple[Picture, ...] = ()

    @staticmethod
    def unanswered(prompt: GenerateRequest) -> Row:
        """The bare prompt, of one row, of an episode that was never answered."""
        nothing: dict[str, Any] = dict.fromkeys(("tokens", "logprobs", "versions", "engines"), np.zeros(0))
        asked = Exchange(asked=prompt.tokens, picture=prompt.picture, pictures=prompt.pictures, **nothing)
        return Conversation(exchanges=(asked,)).row(shared=1)


@frozen(kw_only=True)
class Difference:
    """Where messages do not continue a conversation."""

    number: int  # of the message
    changed: bool  # whether it is an answer of the policy that was changed
    text: str


@frozen(kw_only=True, eq=False)
class RenderedRequest:
    """What a request adds to a conversation."""

    messages: tuple[Message, ...]  # the conversation's own first, then the new ones
    tools: tuple[Mapping[str, Any], ...]
    tokens: IntArray  # [n] to append to the conversation's
    by_tokens: bool = False  # it has tokens in place of messages
    most_calls: int | None = None  # calls of tools that are read from the answer; None: all
    options: Mapping[str, Any] = field(factory=dict)
    written: str = ""  # what the chat template writes for it
    opened: str = ""  # the reasoning tag that is left open there, and what follows it
    # [n] of the tokens: 1 + the index in `pictures`, 0 for text
    picture: IntArray = field(default=Factory(lambda self: np.zeros(len(self.tokens), np.int32), takes_self=True))
    pictures: tuple[Picture, ...] = ()  # of the new messages, each in its place


@frozen(kw_only=True, eq=False)
class Conversation:
    """All that was said up to an answer; initially empty. Immutable: each answer makes a new one, which shares with
    this one what was said before."""

    messages: tuple[Message, ...] = ()  # contents are plain text; answers as sent to the client
    text: str = ""  # of the last answer, including tool calls
    opened: str = ""  # the reasoning tag with which it begins
    # Indices of the messages that were sampled, each with `Answer.parts`.
    answers: Mapping[int, tuple[str, str]] = field(factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()  # shown by the first request
    options: Mapping[str, Any] = field(factory=dict)  # of the last request, for the chat template
    by_tokens: bool = False  # the last request had tokens in place of messages: only tokens can go on from there
    exchanges: tuple[Exchange, ...] = ()

    @property
    def tokens(self) -> IntArray:
        """[n]"""
        return _joined([part for exchange in self.exchanges for part in (exchange.asked, exchange.tokens)], np.int64)

    @property
    def shown(self) -> tuple[IntArray, tuple[Picture, ...]]:
        """[n] what each token stands for, 1 + the index of a picture or 0 for text; and the pictures, each once."""
        return all_shown(
            [
                (np.concatenate([exchange.picture, np.zeros(len(exchange.tokens), np.int32)]), exchange.pictures)
                for exchange in self.exchanges
            ]
        )

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the first request."""
        return len(self.exchanges[0].asked) if self.exchanges else 0

    @property
    def sampled(self) -> IntArray:
        """[n] all tokens of the last answer, of which each piece may have been asked for by itself."""
        first = max((number for number, exchange in enumerate(self.exchanges) if len(exchange.asked)), default=0)
        return _joined([exchange.tokens for exchange in self.exchanges[first:]], np.int64)

    @property
    def begun(self) -> int:
        """Number of tokens after the first request's."""
        return sum(map(len, self.exchanges)) - self.prompt_length

    @property
    def routed_experts(self) -> Array | None:
        """[n, MoE layers, experts per token] those a token was sampled with, or else of the pass that first read it."""
        if not self.exchanges or (last := self.exchanges[-1].experts) is None:
            return None
        whole = np.full((sum(map(len, self.exchanges)), *last.shape[1:]), -1, last.dtype)
        end = 0
        for exchange in self.exchanges:
            begin, end = end, end + len(exchange)
            if exchange.experts is not None:
                whole[begin:end] = exchange.experts
            if exchange.learned is not None:
                whole[exchange.earlier] = exchange.learned
        return whole

    def answered(self, asked: RenderedRequest, answer: Answer, generation: Generation) -> Conversation:
        """Append what `asked` adds, then the one row of `generation`."""
        experts, before = generation.routed_experts, sum(map(len, self.exchanges))
        earlier: IntArray = np.zeros(0, np.int64)
        if experts is not None:
            known = self.routed_experts
            unknown = np.ones(before, np.bool_) if known is None else (known < 0).any(axis=(1, 2))
            earlier = np.flatnonzero(unknown)
        exchange = Exchange(
            asked=asked.tokens,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            versions=generation.versions,
            engines=generation.engines,
            experts=None if experts is None else experts[before:].copy(),  # not a view: those before would stay
            earlier=earlier,
            learned=None if experts is None else experts[earlier],
            picture=asked.picture,
            pictures=asked.pictures,
        )
        return Conversation(
            messages=() if asked.by_tokens else (*asked.messages, answer.message),
            text=answer.text,
            opened=answer.opened,
            answers={} if asked.by_tokens else {**self.answers, len(asked.messages): answer.parts},
            by_tokens=asked.by_tokens,
            tools=asked.tools,
            options=asked.options,
            exchanges=(*self.exchanges, exchange),
        )

    def shared(self, other: Conversation) -> int:
        """How many first answers are those of another conversation."""
        both = zip(self.exchanges, other.exchanges, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], both))

    def row(
        self, *, shared: int = 0, truncated: bool = False, final: bool = True, rewards: Sequence[float] = ()
    ) -> Row:
        """The row that trains on all answers but the first `shared` ones; `rewards` are of all answers."""
        own = self.exchanges[shared:]
        lengths = [length for exchange in self.exchanges for length in (len(exchange.asked), len(exchange.tokens))]
        chosen = [sampled and number >= shared for number in range(len(self.exchanges)) for sampled in (False, True)]
        loss_mask = np.repeat(np.array(chosen, np.bool_), lengths)
        logprobs, versions = np.zeros(len(loss_mask), np.float32), np.zeros(len(loss_mask), np.int64)
        logprobs[loss_mask] = _joined([exchange.logprobs for exchange in own], np.float32)
        versions[loss_mask] = _joined([exchange.versions for exchange in own], np.int64)
        engines = np.zeros(len(loss_mask), np.int16)
        engines[loss_mask] = _joined([exchange.engines for exchange in own], np.int16)
        turn_rewards = np.zeros(len(loss_mask), np.float32)
        turn_rewards[np.cumsum(lengths)[2 * shared + 1 :: 2] - 1] = rewards[shared:] or 0.0
        picture, pictures = self.shown
        return Row(
            tokens=self.tokens,
            picture=picture,
            pictures=pictures,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            engines=engines,
            turn_rewards=turn_rewards,
            routed_experts=self.routed_experts,
            prompt_length=self.prompt_length,
            turns=len(self.exchanges) - shared,
            text=self.text,
            truncated=truncated,
            final=final,
        )

    def difference(self, messages: Sequence[Message], *, since: int = 0) -> Difference | None:
        """Where these messages first differ from this conversation's, which they are known to share up to number
        `since`, or that they add none; None if they continue it."""
        both = zip(self.messages[since:], messages[since : len(self.messages)], strict=False)
        for number, (had, got) in enumerate(both, start=since):
            if had == got:
                continue
            # A client may add fields to an answer, such as tool calls that it parsed itself.
            answer = number in self.answers
            if answer and _says(got, had, self.answers[number]):
                got = {**got, **{key: had[key] for key in TEXTS if key in had}}
            for key in sorted(had if answer else {*had, *got}):
                pair = [had.get(key), got.get(key)]
                if answer and key == "tool_calls":
                    pair = [normalized(calls) for calls in pair]
                if pair[0] != pair[1]:
                    return Difference(
                        number=number,
                        changed=answer and got.get("role") == "assistant",
                        text=f"messages[{number}].{key}: got {short_repr(got.get(key), SHOWN)}, but the episode has "
                        f"{short_repr(had.get(key), SHOWN)} there",
                    )
        if len(messages) > len(self.messages):
            return None
        return Difference(
            number=len(messages),
            changed=False,
            text=f"messages: got {len(messages)}, but the episode already has {len(self.messages)}, including its "
            "last answer",
        )


def _says(got: Message, had: Message, parts: tuple[str, str]) -> bool:
    """Whether a message has the texts of an answer whose reasoning and rest are `parts`: clients send the reasoning as
    they got it, or in a field of its own, or leave out such a field. White space at the ends does not count."""
    content = str(got.get("content", "")).strip()
    given = [value.strip() for key in TEXTS[1:] if isinstance(value := got.get(key), str)]
    if given and (next(filter(None, given), ""), content) == parts:
        return True
    return not any(given) and content == had["content"].strip()


def _joined(parts: Sequence[Array], dtype: type) -> Any:
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype, casting="unsafe")
