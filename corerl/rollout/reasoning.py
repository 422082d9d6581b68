"""Find the reasoning in answers: what a chat template opens before an answer begins, and where reasoning ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
TAIL = 64  # tokens of a prompt that are decoded to see how it ends; a longer generation prompt is rendered again


def left_open(text: str) -> str:
    """The end of `text` from its last opening tag on; "" if there is none, or if it is closed."""
    found = list(OPENING.finditer(text))
    if not found or TAGS[found[-1][0]] in text[found[-1].end() :]:
        return ""
    return text[found[-1].start() :]


def end_of_reasoning(text: str, opened: str = "") -> int:
    """Where the reasoning that begins an answer ends, with its closing tag: 0 if none begins it, and the whole length
    if it is not closed. `opened`: as `left_open` of what stands before the answer."""
    begins = OPENING.match(opened) or OPENING.match(text, len(text) - len(text.lstrip()))
    if begins is None:
        return 0
    close = TAGS[begins[0]]
    at = text.find(close, 0 if opened else begins.end())
    return len(text) if at < 0 else at + len(close)


def split(text: str, opened: str = "") -> tuple[str, str]:
    """The reasoning that begins an answer, without its tags, and the rest, both stripped."""
    end = end_of_reasoning(text, opened)
    reasoning = text[:end].strip()
    if begins := OPENING.match(reasoning):
        reasoning = reasoning[begins.end() :]
    for close in TAGS.values():
        reasoning = reasoning.removesuffix(close)
    return reasoning.strip(), text[end:].strip()


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
    texts = [
        render(tokenizer, messages, tools=tools, options=options, generation_prompt=added) for added in (True, False)
    ]
    return texts[0][len(texts[1]) :] if texts[0].startswith(texts[1]) else ""


class Openings:
    """The reasoning tags that one tokenizer's chat template opens, known again by how a prompt ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ever = OPENING.search(str(tokenizer.chat_template)) is not None
        self._known: set[str] = set()  # generation prompts that leave a tag open

    def of_text(self, text: str, prompt: Callable[[], str]) -> str:
        """The tag that is left open where `text`, a prompt or its end, ends with the generation prompt, and what
        follows the tag; "" if there is none. `prompt` renders the generation prompt, if this is a new one."""
        if not self._ever or not left_open(text):
            return ""
        found = next((each for each in self._known if text.endswith(each)), "") or prompt()
        if opened := left_open(found):
            self._known.add(found)
        return opened

    def of_tokens(self, tokens: Iterable[int], prompt: Callable[[], str]) -> str:
        """As `of_text`, of the tokens of a prompt."""
        return self.of_text(str(self._tokenizer.decode(list(tokens)[-TAIL:])), prompt) if self._ever else ""

    def seen(self, opened: str, *, special_tokens: bool) -> str:
        """What a text of the answer shows of `opened`; "" if its tag is a special token and these are left out."""
        if not opened:
            return ""
        (ids,) = plain(self._tokenizer, [opened])
        text = str(self._tokenizer.decode(ids, skip_special_tokens=not special_tokens))
        return text if OPENING.search(text) else ""
