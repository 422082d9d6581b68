"""Encode prompts as tokens: texts with the tokenizer's begin tokens, chats with its chat template, which may
open a reasoning tag before the answer."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from corerl.data.chat import MARK, text_of
from corerl.data.files import Refused
from corerl.data.prompts import Prompt, PromptSource
from corerl.engines.base import UNLIMITED
from corerl.errors import ConfigError, DataError, ModelError
from corerl.messages import LONGEST_LINE, one_line, short_repr, shorten
from corerl.models.tokenizer import plain
from corerl.pictures import Picture, PictureReader, read
from corerl.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST = 64  # prompts that are checked before a run starts, of all sources together
PROBES = ("0", "a", ".")  # texts of an ordinary token in most vocabularies


class Rejected(Exception):
    """The chat template refuses messages, or leaves out what is to be continued."""


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """[P] each prompt's tokens, up to where the response begins; `options` are arguments of the chat template.

    Raises DataError if a prompt has no tokens, or if the template refuses a chat.
    """
    texts: list[str] = []
    for prompt in prompts:
        try:
            texts.append(written(tokenizer, prompt, options))
        except Rejected as rejected:
            raise DataError(f"prompt {prompt.index}: {rejected}") from rejected
    encoded = _tokens(tokenizer, prompts, texts)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise DataError(
                f"prompt {prompt.index} ({prompt.text!r}) has no tokens, so the model has nothing to continue"
            )
    return encoded


def written(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: Mapping[str, Any] | None) -> str:
    """A prompt's text; of a chat, what the template makes of it. Raises Rejected."""
    if not prompt.messages:
        return prompt.text
    for name in prompt.template_options:
        if (wrong := wrong_option(tokenizer, name)) is not None:
            raise Rejected(f"chat_template_kwargs.{name}: {wrong}, or list the field in data.ignore")
    own = {**(options or {}), **prompt.template_options}
    return render(tokenizer, prompt.messages, tools=prompt.tools, options=own)


def _tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    before: Sequence[int] | None = None,
) -> list[list[int]]:
    """[P] the tokens of each prompt's text; `before` as for `encode_texts`. A chat template writes <bos> itself."""
    others = [text for prompt, text in zip(prompts, texts, strict=True) if not prompt.messages]
    chats = [text for prompt, text in zip(prompts, texts, strict=True) if prompt.messages]
    of_texts = iter(encode_texts(tokenizer, others, before) if others else ())
    of_chats = iter(plain(tokenizer, chats))
    return [next(of_chats if prompt.messages else of_texts) for prompt in prompts]


# ---- pictures --------------------------------------------------------------------------------------------------------


def expand(ids: Sequence[int], pictures: Sequence[Picture], reader: PictureReader | None) -> tuple[IntArray, IntArray]:
    """[n] tokens and [n] their column `picture`: the tokens of each picture in the place of the one that a template
    writes for it. Without a `reader` all are text. Raises Refused if these are not as many as pictures, or a text
    spells the placeholder."""
    tokens = np.asarray(ids, dtype=np.int64)
    if reader is None:
        return tokens, np.zeros(len(tokens), dtype=np.int32)
    places = np.flatnonzero(tokens == reader.mark)
    if len(places) != len(pictures):
        raise Refused(
            "whose pictures and marks differ in number",
            f"{len(pictures)} pictures, but the prompt has the token that stands for one {len(places)} times; a chat "
            "template that leaves pictures out, or a text that spells this token, cannot be used",
        )
    if reader.mark != reader.placeholder and (tokens == reader.placeholder).any():
        raise Refused(
            "whose pictures and marks differ in number",
            "a text that spells the token where a picture's features go cannot be used",
        )
    parts, columns = [], []
    for number, (begin, place) in enumerate(zip([0, *(places + 1)], [*places, len(tokens)], strict=True), start=1):
        parts.append(tokens[begin:place])
        columns.append(np.zeros(place - begin, dtype=np.int32))
        if number <= len(pictures):
            own = reader.expand(pictures[number - 1])
            column = np.zeros(len(own), dtype=np.int32)
            # What the processor writes behind the last placeholder ends the picture: two of the same stay apart.
            column[: np.flatnonzero(own == reader.placeholder)[-1] + 1] = number
            parts.append(own)
            columns.append(column)
    return np.concatenate(parts), np.concatenate(columns)


# ---- texts -----------------------------------------------------------------------------------------------------------


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], before: Sequence[int] | None = None
) -> list[list[int]]:
    """[n] each text's tokens as the beginning of a row: after what the tokenizer puts before a text (its <bos>), unless
    the text begins with that. What it puts behind one ends it, and would leave nothing to continue. `before` is what
    is put before, where the caller knows it."""
    if before is None:
        before = _put_before(tokenizer, [*PROBES, *texts[:1]]) or []
    before = list(before)
    return [ids if ids[: len(before)] == before else before + ids for ids in plain(tokenizer, texts)]


def _put_before(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int] | None:
    """The tokens that the tokenizer puts before a text, found with the first of these that it knows; None: it knows
    none of them."""
    for text in texts:
        (inner,), whole = plain(tokenizer, [text]), tokenizer(text)["input_ids"]
        places = [at for at in range(len(whole)) if inner and whole[at : at + len(inner)] == inner]
        if places:
            return list(whole[: places[0]])
    return None


# ---- chats -----------------------------------------------------------------------------------------------------------


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
) -> str:
    """The text of a chat, up to where the assistant's answer begins; a last message of the assistant is the beginning
    of that answer. Without `generation_prompt` it ends with the last message. Raises Rejected, saying why."""
    goes_on = messages[-1]["role"] == "assistant"
    forms, errors = [[dict(message) for message in messages]], list[Exception]()
    if any(message.get("tool_calls") for message in messages):
        forms.append([_with_text_arguments(message) for message in messages])
    for form in forms:
        try:
            return str(
                tokenizer.apply_chat_template(
                    form,
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt and not goes_on,
                    continue_final_message=goes_on,
                    **(options or {}),
                )
            )
        # Templates may reject system messages or roles that do not alternate. They are also programs, and may fail on
        # any input they were not written for, in any way.
        except Exception as error:
            errors.append(error)
    roles, first = ", ".join(str(message["role"]) for message in messages), errors[0]
    why = shorten(one_line(first), LONGEST_LINE)
    raise Rejected(f"the tokenizer's chat template rejects its messages ({why}); their roles are: {roles}") from first


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """With the arguments of its tool calls as JSON text, as the templates of DeepSeek R1, V3 and V3.1 have them."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            text = json.dumps(function["arguments"], ensure_ascii=False, default=str)
            call = {**call, "function": {**function, "arguments": text}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else dict(message)


# ---- checks ----------------------------------------------------------------------------------------------------------


def require_encodable(
    source: PromptSource, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> None:
    """Raises ModelError if prompts are chats and the tokenizer has no template; ConfigError for an argument that the
    template does not use."""
    if source.chat and not tokenizer.chat_template:
        raise ModelError(
            "data: the prompts are chats, but the tokenizer has no chat template; use the tokenizer of a chat model "
            "(model.tokenizer), or plain-text prompts with data.chat=false"
        )
    if options and not source.chat:
        raise ConfigError(
            "data.chat_template_options: set, but no prompt is a chat; set data.chat=true, or remove the table"
        )
    for name in options or {}:
        if (wrong := wrong_option(tokenizer, name)) is not None:
            raise ConfigError(f"data.chat_template_options.{name}: {wrong}")


def wrong_option(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    """What is wrong with an argument of this name for the tokenizer's chat template, and what to do; None: nothing."""
    if not tokenizer.chat_template:
        return "the tokenizer has no chat template; remove it"
    ours = inspect.signature(tokenizer.apply_chat_template).parameters
    if name in ours or name in ("messages", "conversations"):
        return "is not the template's own argument; CoreRL sets it; remove it"
    if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
        return "the tokenizer's chat template never reads it; correct its name, or remove it"
    return None


@frozen(kw_only=True)
class PromptCheck:
    """Decides which prompts a run can sample from. Called with one, it returns why the prompt is skipped, or ""."""

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(factory=dict)  # arguments of the chat template
    skip: bool = False  # prompts that cannot be rendered for the model, instead of raising
    longest: int = UNLIMITED  # tokens; longer prompts are skipped
    limit: str = ""  # the settings that `longest` follows from, for messages
    pictures: PictureReader | None = None

    # Asked of the tokenizer once: it takes longer than all else that is done for a short prompt.
    @functools.cached_property
    def _before(self) -> Sequence[int] | None:
        return _put_before(self.tokenizer, PROBES)

    def __call__(self, prompt: Prompt) -> str:
        """Raises DataError for a prompt that cannot be rendered for the model, unless `skip`."""
        try:
            text = written(self.tokenizer, prompt, self.options)
        except Rejected as rejected:
            return self._refused(str(rejected))
        if prompt.messages and not text:
            return self._refused("the tokenizer's chat template writes nothing for its messages")
        unknown = self.tokenizer.unk_token_id
        short = self.pictures is None and text.strip() and _tokens_at_most(text) <= self.longest
        if unknown is None and short:
            return ""
        (ids,) = _tokens(self.tokenizer, [prompt], [text], self._before)
        if not ids:
            return self._refused("it has no tokens, so the model has nothing to continue")
        length = len(ids)
        if self.pictures is not None:
            try:
                length = len(expand(ids, [read(each) for each in prompt.pictures], self.pictures)[0])
            except Refused as refused:
                return self._refused(str(refused))
        if length > self.longest:
            return f"it has {length} tokens, but at most {self.longest} fit with {self.limit}"
        if unknown in ids:
            shown = short_repr(self.tokenizer.decode(ids))
            return self._refused(f"it has characters that the tokenizer does not know: the model would see {shown}")
        return ""

    def _refused(self, why: str) -> str:
        if self.skip:
            return why
        raise DataError(f"{why}; correct the row, or set data.refused='skip' to leave out such rows")


def check_first(source: PromptSource, check: PromptCheck, *, seed: int) -> None:
    """Check the prompts that a run of this seed trains on first, as many of each source, and all that are held out:
    those that are skipped are left out of the source, whose notices count them. The other ones are checked when they
    are taken. Raises DataError as `check`, with the prompt's place, and if none is left."""
    training, most = {*source.train.tolist()}, -(-FIRST // len(source.components))
    begins = [component.epoch(0, seed)[:most].tolist() for component in source.components]
    first = [index for begin in begins for index in begin if index in training]
    skipped: dict[int, str] = {}
    indices = sorted({*first, *source.held_out.tolist()})
    for index in indices:
        prompt = source.prompt(index)
        try:
            if why := check(prompt):
                skipped[index] = why
            elif index in training:
                source.checked[index] = prompt
        except DataError as error:
            raise DataError(f"{source.where(index)}: {error.message}") from error
    if skipped:
        index, why = next(iter(skipped.items()))
        line = f"{len(skipped)} of the first {len(indices)} prompts are skipped; {source.where(index)}: {why}"
        try:
            source.leave_out(skipped.keys())
        except DataError as error:
            raise DataError(f"{error.message}: {line}") from error
        source.notices = (*source.notices, f"data: {line}")


def _tokens_at_most(text: str) -> int:
    """An upper bound, without encoding. A token covers at least one byte of the normalized text, in which a space may
    be three bytes, and another character eleven times as long and have spaces in it."""
    return (4 if text.isascii() else 16) * len(text.encode()) + 16


# ---- the tags that open reasoning ------------------------------------------------------------------------------------


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
