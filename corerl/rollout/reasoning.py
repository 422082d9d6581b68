"""The reasoning tags that chat templates open before an answer begins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from corerl.data.chat import MARK, text_of
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
TAIL = 64  # tokens of a prompt decoded to see how it ends; a longer generation prompt is rendered again


def left_open(text: str) -> str:
    """The end of `text` from its last opening tag on; "" without such a tag, or if it is closed."""
    found = list(OPENING.finditer(text))
    if not found or TAGS[found[-1][0]] in text[found[-1].end() :]:
        return ""
    return text[found[-1].start() :]


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
        last = text_of(messages[-1]["content"]).rpartition(MARK)[2].strip()
        return whole.rpartition(last)[2] if last else ""
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
        if no tag is open. `messages`, `tools` and `options` are what was rendered."""
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
