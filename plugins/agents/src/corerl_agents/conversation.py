"""Keep a conversation as tokens: each request appends its new messages' tokens; what was sampled stays as it is."""

from __future__ import annotations

import functools
import itertools
import re
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import Factory, field, frozen

from corerl.data import Refused as Unreadable
from corerl.data import read_message
from corerl.engines import GenerateRequest, Generation, SamplingParams, Stops
from corerl.messages import note, short_repr, shorten
from corerl.models import plain
from corerl.models import special_tokens as special_tokens_of
from corerl.pictures import Picture, PictureReader
from corerl.rollout import Openings, Rejected, encode_texts, expand, left_open, render, wrong_option
from corerl.types import Array, BoolArray, FloatArray, IntArray, all_shown
from corerl_agents.pictures import ids_in
from corerl_agents.pieces import UNFINISHED, known, shared
from corerl_agents.refused import SHOWN, Diverges, Refused
from corerl_agents.texts import FollowingTexts, split
from corerl_agents.tool_calls import Answered, Reader, as_sent, normalized

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
HEADERS = ("<|channel|>", "<|start|>assistant")  # with which gpt-oss begins a message; they are no text
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

    @classmethod
    def unanswered(cls, prompt: GenerateRequest) -> Row:
        """The bare prompt, of one row, of an episode that was never answered."""
        nothing = np.zeros(len(prompt.tokens))
        return cls(
            tokens=prompt.tokens,
            picture=prompt.picture,
            pictures=prompt.pictures,
            loss_mask=nothing.astype(np.bool_),
            logprobs=nothing.astype(np.float32),
            versions=nothing.astype(np.int64),
            engines=nothing.astype(np.int16),
            turn_rewards=nothing.astype(np.float32),
            prompt_length=len(prompt.tokens),
            turns=0,
            text="",
            truncated=False,
            final=True,
        )


@frozen(kw_only=True)
class Difference:
    """Where messages do not continue a conversation."""

    number: int  # of the message
    changed: bool  # whether it is an answer of the policy that was changed
    text: str


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
                of = normalized if answer and key == "tool_calls" else _as_is
                if of(had.get(key)) != of(got.get(key)):
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


def read_messages(messages: Sequence[Any], *, pictures: bool = False) -> tuple[Message, ...]:
    """A request's messages with text as content, and with `pictures` parts of these in it; a last one of the assistant
    is the beginning of the answer. Raises Refused."""
    read = tuple(_read(number, message, pictures=pictures) for number, message in enumerate(messages))
    if not read or (read[-1]["role"] == "assistant" and read[-1].get("tool_calls")):
        raise Refused("messages: nothing to answer; the last message must not be a tool call")
    return read


class Renderer:
    """Encode new messages with the tokenizer's chat template. Without a template, message texts are concatenated, and
    the first request begins as the tokenizer begins a text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        calls: Reader | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        special_tokens: bool = False,
        unshown_tools: bool = False,
        separate_reasoning: bool = False,
        unread: str = "",
        pictures: PictureReader | None = None,
    ) -> None:
        """`calls`: the format of tool calls in answers; None leaves calls in the text. `options`: arguments of the chat
        template. `special_tokens`: keep them in the texts of answers, though not in what is sent to the client.
        `unshown_tools`: tools that the chat template does not show to the model are noted, not refused. `unread`: what
        to note at the first request with tools. `pictures` reads those of messages."""
        self._pictures = pictures
        self._special_tokens = special_tokens
        self._separate_reasoning = separate_reasoning
        self._unread = unread
        self._openings = Openings(tokenizer)
        self._special_names = special_tokens_of(tokenizer)  # by id
        # The headers of gpt-oss's messages have a word that is no special token.
        names = sorted(map(re.escape, self._special_names.values()), key=len, reverse=True)
        self._special = re.compile("|".join([r"(?:<\|start\|>assistant)?<\|channel\|>\w+<\|message\|>", *names]))
        self._tokenizer = tokenizer
        self._following = FollowingTexts(tokenizer)
        self._stops = functools.cache(functools.partial(Stops, tokenizer))  # looks through the vocabulary
        self._calls = calls
        self._options = options or {}
        self._unshown_tools = unshown_tools
        self._shows_tools = False  # once it is known that it does

    def ask(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        most_calls: int | None = None,
        options: Mapping[str, Any] | None = None,
        pictures: Mapping[str, Picture] = MappingProxyType({}),
    ) -> RenderedRequest:
        """What `messages`, which continue those of `conversation`, add to it; `pictures` are theirs, by id. With
        `most_calls=0` tools are not shown; `options` go before the renderer's own. Raises Diverges if tools or options
        make it another conversation, and Refused if the template rejects them."""
        if most_calls == 0:
            tools = conversation.tools  # what was shown stays
        elif conversation.exchanges and list(tools) != list(conversation.tools):
            raise Diverges("tools: differ from those of the request that began the conversation")
        merged = {**self._options, **self._checked(options or {})}
        if tools and most_calls != 0 and self._unread:
            _note_once(self._unread)
        tokens, written, opened = self._tokens(conversation, messages, tools, merged)
        if not len(tokens) and not conversation.exchanges:
            raise Refused("messages: contain no tokens, so the model has nothing to continue; send text")
        new = messages[len(conversation.messages) :]
        shown = tuple(pictures[name] for name in ids_in(new))
        expanded, column = self._expanded(tokens, shown)
        return RenderedRequest(
            messages=(*conversation.messages, *new),
            tools=tuple(tools),
            tokens=expanded,
            picture=column,
            pictures=shown,
            most_calls=most_calls,
            options=merged,
            written=written,
            opened=opened,
        )

    def _expanded(self, tokens: Sequence[int], shown: Sequence[Picture]) -> tuple[IntArray, IntArray]:
        if self._pictures is None:
            return np.asarray(tokens, dtype=np.int64), np.zeros(len(tokens), dtype=np.int32)
        try:
            return expand(tokens, shown, self._pictures)
        except Unreadable as error:
            raise Refused(f"messages: {error}") from error

    def _checked(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in options:
            if (wrong := wrong_option(self._tokenizer, name)) is not None:
                raise Refused(f"chat_template_kwargs.{shorten(name, SHOWN)}: {wrong}", code="unsupported_parameter")
        return options

    def _tokens(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> tuple[list[int], str, str]:
        """The tokens that the messages add, the text that they are, and what of it is left open."""
        known = len(conversation.messages)
        template = bool(self._tokenizer.chat_template)
        if tools and not template:
            raise Refused("tools: the tokenizer has no chat template to present them; describe them in a message")
        if not template:
            if ids_in(messages[known:]):
                raise Refused("messages: the tokenizer has no chat template to show pictures with; send text")
            text = "".join(message["content"] for message in messages[known:])
            tokens = self._following.encode(text) if known else encode_texts(self._tokenizer, [text])[0]
            return tokens, text, ""
        if not known:
            text = self._rendered(messages, tools, options)
            if tools and not self._shows_tools:
                self._require_shown(text, messages, options)
            return plain(self._tokenizer, [text])[0], text, self._opened(text, messages, tools, options)
        # Find what the template writes after the last answer, whatever it makes of the answer itself.
        mark = uuid.uuid4().hex
        # Answers as plain text: a template may refuse tool calls that the policy made, such as two at once. Others
        # refuse the results of calls that they are not shown: those of gpt-oss, MiniMax M2 and Mistral.
        marked = _marked(messages, conversation, mark)
        with_calls = False
        try:
            written = self._rendered(marked, tools, options)
        except Refused:
            marked = _marked(messages, conversation, mark, calls=True)
            with_calls = bool(messages[known - 1].get("tool_calls"))
            written = self._rendered(marked, tools, options)
        before, found, following = written.rpartition(mark)
        if not found:
            raise Diverges("messages: the chat template omits the last answer, so nothing can follow it")
        last = int(conversation.tokens[-1])
        if with_calls:  # behind the mark is the end of a call, which the policy wrote itself, then what ends the answer
            end = self._special_names.get(last, "")
            if not end or end not in following:
                raise Diverges("messages: the chat template ends the last answer otherwise than the policy did")
            following = following[following.index(end) :]
        had = conversation.options
        if options != had and before != self._rendered(marked, tools, had).rpartition(mark)[0]:
            raise Diverges(
                f"chat_template_kwargs: got, with the run's own, {short_repr(options, SHOWN)}, but earlier messages "
                f"were written with {short_repr(had, SHOWN)}, and the chat template would write them otherwise now"
            )
        tokens = self._following.encode(following)
        # It begins with the answer's end token, which was already sampled unless the answer was cut.
        ended = tokens[:1] == [last]
        return tokens[1:] if ended else tokens, following, self._opened(following, marked, tools, options)

    def _opened(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """The reasoning tag that is left open where the answer begins."""
        if messages[-1]["role"] == "assistant":
            return left_open(messages[-1]["content"])
        return self._openings.of(text, messages, tools=tools, options=options)

    def _require_shown(self, text: str, messages: Sequence[Message], options: Mapping[str, Any]) -> None:
        """Raise Refused, or tell the user, if `text` is what the template would write without tools."""
        self._shows_tools = text != self._rendered(messages, (), options)
        if self._shows_tools:
            return
        what = "the tokenizer's chat template does not show them to the model"
        if not self._unshown_tools:
            raise Refused(
                f"tools: {what}; use a tokenizer (model.tokenizer) whose template does, or describe them in a message "
                "and set samplers.episodes.tool_calls to how the model writes calls, or to 'none'"
            )
        _note_once(f"tools of a request: {what}, so it knows only what messages say of them")

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        try:
            return render(self._tokenizer, messages, tools=tools, options=options)
        except Rejected as rejected:
            raise Refused(f"messages: {rejected}") from rejected

    def _reader(self, asked: RenderedRequest) -> Reader | None:
        """What reads tool calls from the answer; None if nothing does."""
        return self._calls if asked.tools and asked.most_calls != 0 else None

    def known(self, asked: RenderedRequest, tokens: IntArray, params: SamplingParams) -> tuple[str, str]:
        """Reasoning and content of the answer that begins with these tokens, as far as they are known: whatever tokens
        follow, those of `answer` begin with them, but for white space at their beginning."""
        stops, reader = self._stops(params.stop), self._reader(asked)
        content = stops.text(tokens.tolist(), special_tokens=False)
        whole = stops.text(tokens.tolist(), special_tokens=True).rstrip(UNFINISHED)
        marks = [*params.stop, *HEADERS, *(() if reader is None else reader.begins)]
        found = known(whole, asked.opened, marks, stops=params.stop, apart=self._separate_reasoning)
        reasoning, text = (self._special.sub("", part).rstrip() for part in found)
        # Of an answer without calls the content is decoded without special tokens, not rid of them.
        return reasoning, text if reasoning else shared(text, content.rstrip(UNFINISHED))

    def stopped(self, tokens: IntArray, texts: Sequence[str]) -> str:
        """Which of these stop texts has ended an answer; "" if none has."""
        said = tokens.tolist()
        return next((text for text in texts if self._stops((text,)).end(said) == len(said)), "")

    def answer(
        self, asked: RenderedRequest, tokens: IntArray, params: SamplingParams, before: Conversation | None = None
    ) -> Answer:
        """Decode an answer without its stop token or stop text. If the request has tools and the answer was not cut,
        tool calls are read from it; malformed ones stay text. If `asked` adds no tokens, this is another piece of the
        last answer of `before`, and `text` is that of the whole answer."""
        stops = self._stops(params.stop)
        ended = bool(len(tokens)) and int(tokens[-1]) in params.stop_tokens
        answered = (tokens[:-1] if ended else tokens).tolist()
        ended = ended or stops.end(answered) is not None
        content = stops.text(answered, special_tokens=False)
        whole = stops.text(answered, special_tokens=True)
        text, opened = whole if self._special_tokens else content, ""
        if before is not None and not len(asked.tokens):
            text, opened = self._with_earlier(before.sampled.tolist(), answered, text), before.opened
        elif asked.opened and asked.messages[-1]["role"] != "assistant":
            opened = self._openings.seen(asked.opened, special_tokens=self._special_tokens)
        # Delimiters of calls and of reasoning are special tokens in some tokenizers.
        found = Answered(content=whole)
        calls_read = self._reader(asked)
        if calls_read is not None and ended:
            found = calls_read.read(whole, asked.tools, opened=asked.opened, prompt=asked.written)
        calls = tuple(as_sent(found.calls[: asked.most_calls], number=len(asked.messages)))
        parts = split(found.content, asked.opened) if found.reasoning is None else (found.reasoning, found.content)
        reasoning, rest = (self._special.sub("", part).strip() for part in parts)
        apart = self._separate_reasoning or found.reasoning is not None
        return Answer(
            text=opened + text,
            opened=opened,
            content=rest if apart and reasoning else self._special.sub("", found.content) if calls else content,
            calls=calls,
            reasoning=reasoning if apart else "",
            parts=(reasoning, rest),
        )

    def _with_earlier(self, earlier: list[int], answered: list[int], text: str) -> str:
        """The text of an answer whose last piece has this text by itself. All pieces are decoded together: one may end
        within a character, and tokenizers such as sentencepiece's drop the space that a text begins with."""
        decoded = functools.partial(self._stops(()).text, special_tokens=self._special_tokens)
        stop = len(decoded(answered)) - len(text)  # characters from the stop text on
        whole = decoded(earlier + answered)
        return whole[: len(whole) - stop]


def _marked(
    messages: Sequence[Message], conversation: Conversation, mark: str, *, calls: bool = False
) -> list[Message]:
    """These messages with the mark in the place of the conversation's last answer, or where `calls` are shown, of the
    arguments of its last call. Answers have no other fields than role, content and these."""
    texts = list(messages)
    for number in conversation.answers:
        message = messages[number]
        shown = {"tool_calls": message["tool_calls"]} if calls and message.get("tool_calls") else {}
        texts[number] = {"role": message["role"], "content": message["content"], **shown}
    place = len(conversation.messages) - 1
    if "tool_calls" in texts[place]:
        *others, call = texts[place]["tool_calls"]
        call = {**call, "function": {**call["function"], "arguments": {"mark": mark}}}
        texts[place] = {**texts[place], "tool_calls": [*others, call]}
    else:
        texts[place] = {"role": "assistant", "content": mark}
    # An answer and the beginning that its request gave it are one message.
    beginnings = {number - 1 for number in conversation.answers if texts[number - 1]["role"] == "assistant"}
    return [message for number, message in enumerate(texts) if number not in beginnings]


@functools.cache
def _note_once(line: str) -> None:
    note(line)


def _read(number: int, message: Any, *, pictures: bool) -> Message:
    """Normalize a message as the data's are; clients leave out empty content."""
    if isinstance(message, Mapping) and not message.get("content"):
        message = {**message, "content": ""}
    try:
        return read_message(message, pictures=pictures)
    except ValueError as error:
        raise Refused(f"messages[{number}] {error}") from error


def _as_is(value: Any) -> Any:
    return value


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
