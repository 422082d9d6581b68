"""Find the reasoning in answers: what a chat template opens before an answer begins, and where reasoning ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from corerl.models.tokenizer import plain
from corerl.rollout.encoding import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Opening tag -> closing tag.
TAGS: Mapping[str, str] = {
    "<think>": "</think>",  # DeepSeek R1, Qwen 3 and 3.5, GLM, Kimi K2, MiniMax M2, Nemotron
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "[THINK]": "[/THINK]",  # Mistral
    "\u25c1think\u25b7": "\u25c1/think\u25b7",  # Kimi-VL
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss
}
OPENING = re.compile("|".join(map(re.escape, TAGS)))
# Closing tags that mean nothing else, so that text before one is reasoning even if no tag opened it.
CLOSING = re.compile("|".join(re.escape(tag) for tag in TAGS.values() if "/" in tag or "END" in tag))
TAIL = 64  # tokens of a prompt decoded to see how it ends; a longer generation prompt is rendered again


def left_open(text: str) -> str:
    """The end of `text` from its last opening tag on; "" if there is none, or if it is closed."""
    found = list(OPENING.finditer(text))
    if not found or TAGS[found[-1][0]] in text[found[-1].end() :]:
        return ""
    return text[found[-1].start() :]


def _bounds(text: str, opened: str) -> tuple[int, int, int]:
    """Where the reasoning that begins an answer begins and ends, without its tags, and where the rest begins."""
    again = OPENING.match(text, len(text) - len(text.lstrip()))
    if (begins := OPENING.match(opened) or again) is None:
        return 0, 0, 0
    begin, close = again.end() if again else 0, TAGS[begins[0]]
    at = text.find(close, begin)
    return (begin, len(text), len(text)) if at < 0 else (begin, at, at + len(close))


def end_of_reasoning(text: str, opened: str = "") -> int:
    """Where the reasoning that begins an answer ends, with its closing tag: 0 if none begins it, and the whole length
    if it is not closed. `opened`: as `left_open` of what stands before the answer."""
    return _bounds(text, opened)[2]


def split(text: str, opened: str = "") -> tuple[str, str]:
    """The reasoning that begins an answer, without its tags, and the rest, both stripped."""
    begin, end, rest = _bounds(text, opened)
    return text[begin:end].strip(), text[rest:].strip()


def generation_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """What the chat template writes behind these messages for the answer to begin; "" where the last message is its
    beginning. Raises Rejected."""
    if not messages or messages[-1]["role"] == "assistant":
        return ""
    whole, without = (
        render(tokenizer, messages, tools=tools, options=options, generation_prompt=added) for added in (True, False)
    )
    if whole == without:  # a template that always writes it
        return whole.rpartition(messages[-1]["content"].strip())[2]
    return whole[len(without) :] if whole.startswith(without) else ""


class Openings:
    """The reasoning tags that one tokenizer's chat template opens, recognized by how a prompt ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ever = OPENING.search(str(tokenizer.chat_template)) is not None
        self._known: set[str] = set()  # generation prompts that leave a tag open

    def of(
        self,
        prompt: str | Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The tag that the template leaves open at the end of `prompt`, a text or tokens, and what follows the tag; ""
        if there is none. `messages`, `tools` and `options` are what was rendered."""
        if not self._ever:
            return ""
        text = prompt if isinstance(prompt, str) else str(self._tokenizer.decode(list(prompt[-TAIL:])))
        if not left_open(text):
            return ""
        found = next((each for each in self._known if text.endswith(each)), "")
        found = found or generation_prompt(self._tokenizer, messages, tools=tools, options=options)
        if opened := left_open(found):
            self._known.add(found)
        return opened

    def seen(self, opened: str, *, special_tokens: bool) -> str:
        """What a text of the answer shows of `opened`; "" if its tag is a special token and these are left out."""
        if not opened:
            return ""
        (ids,) = plain(self._tokenizer, [opened])
        text = str(self._tokenizer.decode(ids, skip_special_tokens=not special_tokens))
        return text if OPENING.search(text) else ""
