"""The tokens that a request adds to a conversation: its new messages as the tokenizer's chat template writes them."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from corerl.data import Refused as Unreadable
from corerl.data import read_message
from corerl.messages import note, short_repr, shorten
from corerl.models import plain
from corerl.models import special_tokens as special_tokens_of
from corerl.pictures import Picture, PictureReader
from corerl.rollout import Openings, Rejected, encode_texts, expand, left_open, render, wrong_option
from corerl.types import IntArray
from corerl_agents.conversation import Conversation, Message, RenderedRequest
from corerl_agents.pictures import ids_in
from corerl_agents.refused import SHOWN, Diverges, Refused
from corerl_agents.texts import FollowingTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        options: Mapping[str, Any] | None = None,
        *,
        unshown_tools: bool = False,
        unread: str = "",
        section: str = "samplers.episodes",
        pictures: PictureReader | None = None,
    ) -> None:
        """`options`: arguments of the chat template. `unshown_tools`: tools that the chat template does not show to the
        model are noted, not refused. `unread`: what to note at the first request with tools. `section`: of the config,
        with `tool_calls`. `pictures` reads those of messages."""
        self._tokenizer = tokenizer
        self._options = options or {}
        self._unshown_tools = unshown_tools
        self._unread = unread
        self._section = section
        self._pictures = pictures
        self._openings = Openings(tokenizer)
        self._special_names = special_tokens_of(tokenizer)  # by id
        self._following = FollowingTexts(tokenizer)
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
                f"and set {self._section}.tool_calls to how the model writes calls, or to 'none'"
            )
        _note_once(f"tools of a request: {what}, so it knows only what messages say of them")

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        try:
            return render(self._tokenizer, messages, tools=tools, options=options)
        except Rejected as rejected:
            raise Refused(f"messages: {rejected}") from rejected


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
