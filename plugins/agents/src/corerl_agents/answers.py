"""What an answer's tokens say: its text, its reasoning and its tool calls, whole or as far as they are known."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from corerl.engines import SamplingParams, Stops
from corerl.models import special_tokens as special_tokens_of
from corerl.rollout import OPENING, TAGS, Openings
from corerl.types import IntArray
from corerl_agents.chat_requests import UNFINISHED
from corerl_agents.conversation import Answer, Conversation, RenderedRequest
from corerl_agents.texts import FollowingTexts, bounds, split
from corerl_agents.tool_calls import Answered, Reader, as_sent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADERS = ("<|channel|>", "<|start|>assistant")  # with which gpt-oss begins a message; they are no text


class AnswerReader:
    """Decodes the answers to rendered requests."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        calls: Reader | None = None,
        *,
        special_tokens: bool = False,
        separate_reasoning: bool = False,
    ) -> None:
        """`calls`: the format of tool calls; None leaves calls in the text. `special_tokens`: keep them in the texts of
        answers, though not in what is sent to the client. `separate_reasoning`: send it apart from the content."""
        self._calls = calls
        self._special_tokens = special_tokens
        self._separate_reasoning = separate_reasoning
        self._openings = Openings(tokenizer)
        self._stops = functools.cache(functools.partial(Stops, tokenizer))  # looks through the vocabulary
        self._text_of = functools.cache(FollowingTexts(tokenizer).token)
        # The headers of gpt-oss's messages have a word that is no special token.
        names = sorted(map(re.escape, special_tokens_of(tokenizer).values()), key=len, reverse=True)
        self._special = re.compile("|".join([r"(?:<\|start\|>assistant)?<\|channel\|>\w+<\|message\|>", *names]))

    def read(
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

    def _reader(self, asked: RenderedRequest) -> Reader | None:
        """What reads tool calls from the answer; None if nothing does."""
        return self._calls if asked.tools and asked.most_calls != 0 else None

    def known(self, asked: RenderedRequest, tokens: IntArray, params: SamplingParams) -> tuple[str, str]:
        """Reasoning and content of the answer that begins with these tokens, as far as they are known: whatever tokens
        follow, those of `read` begin with them, but for white space at their beginning."""
        stops, reader = self._stops(params.stop), self._reader(asked)
        content = stops.text(tokens.tolist(), special_tokens=False)
        whole = stops.text(tokens.tolist(), special_tokens=True).rstrip(UNFINISHED)
        marks = [*params.stop, *HEADERS, *(() if reader is None else reader.begins)]
        found = _known(whole, asked.opened, marks, stops=params.stop, apart=self._separate_reasoning)
        reasoning, text = (self._special.sub("", part).rstrip() for part in found)
        # Of an answer without calls the content is decoded without special tokens, not rid of them.
        return reasoning, text if reasoning else _shared(text, content.rstrip(UNFINISHED))

    def texts(self, tokens: IntArray) -> list[str]:
        """[m] each token as text by itself."""
        return [self._text_of(token) for token in tokens.tolist()]

    def stopped(self, tokens: IntArray, texts: Sequence[str]) -> str:
        """Which of these stop texts has ended an answer; "" if none has."""
        said = tokens.tolist()
        return next((text for text in texts if self._stops((text,)).end(said) == len(said)), "")


# ---- while it is sampled ------------------------------------------------------------------------------------------


def before(text: str, marks: Sequence[str]) -> str:
    """The text before the first of these marks, or before what may be the beginning of one at its end."""
    end = min((at for at in map(text.find, marks) if at >= 0), default=len(text))
    return text[:end] if end < len(text) else text[: len(text) - _begun(text, marks)]


def _begun(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    begun = (length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length]))
    return max(begun, default=0)


def _known(text: str, opened: str, marks: Sequence[str], *, stops: Sequence[str], apart: bool) -> tuple[str, str]:
    """The reasoning and the content of an answer that begins with `text`, as far as both are known. `opened`: the
    reasoning tag that is open before it. `marks`: texts from which on nothing is content; `stops` of them end reasoning
    too. With `apart` the content has no reasoning."""
    if not apart:
        return "", before(text, marks)
    said = text.lstrip()
    if not said or any(tag.startswith(said) for tag in TAGS):
        return "", ""
    begin, end, rest = bounds(text, opened)
    if not rest:
        return "", before(text, marks)
    if rest == end:  # not closed
        tag = OPENING.match(opened) or OPENING.match(said)
        assert tag is not None
        return before(text[begin:], [TAGS[tag[0]], *stops]).strip(), ""
    reasoning = text[begin:end].strip()
    # An answer whose reasoning is empty is sent with its tags.
    return reasoning, before(text[rest:], marks).lstrip() if reasoning else before(text, marks)


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]
