"""Encode prompts as tokens: texts with the tokenizer's begin tokens, chats with its chat template."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from corerl.data.prompts import Prompt, PromptSource
from corerl.errors import ConfigError, DataError, ModelError
from corerl.messages import one_line
from corerl.rollout.engine import UNLIMITED
from corerl.rollout.limits import TimeLimit, TooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LOOKED_AT = 64  # prompts of each source whose characters are checked before a run starts
PART = 256  # prompts that are looked at together, at most
PART_SECONDS = 0.25  # for which chats of a part are rendered: a check looks at the clock between parts
RENDERED_WITHIN = 10.0  # seconds, for one chat: a template is a program, and may not end
LONGEST_CHAT = 2**22  # characters, of about a million tokens
PROBES = ("0", "a", ".")  # texts of an ordinary token in most vocabularies
ANCHORS = ("\n", ".", "a", "0")  # put before a text, to see how it is encoded behind another


class Rejected(Exception):
    """The chat template refuses messages, or leaves out what is to be continued."""


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """[P] each prompt's tokens, up to where the response begins; `options` are arguments of the chat template.

    Raises DataError if a prompt has no tokens, or if the template refuses a chat.
    """
    encoded: list[list[int]] = []
    for ids in _encoded(tokenizer, prompts, options):
        if isinstance(ids, DataError):
            raise ids
        encoded.append(ids)
    return encoded


def _encoded(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: Mapping[str, Any] | None
) -> list[list[int] | DataError]:
    """[P] each prompt's tokens, or why it has none."""
    return _tokens(tokenizer, prompts, [text for _, text in _written(tokenizer, prompts, options)])


def _written(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Prompt],
    options: Mapping[str, Any] | None,
    *,
    seconds: float = math.inf,
) -> list[tuple[Prompt, str | Rejected]]:
    """[P] each prompt with its text, of a chat the template's, or why the template refuses it. After `seconds` no
    other prompt is taken, but for the first."""
    written: list[tuple[Prompt, str | Rejected]] = []
    until = time.monotonic() + seconds
    with TimeLimit(RENDERED_WITHIN) as limit:
        for prompt in prompts:
            try:
                text = _rendered(tokenizer, prompt, options, limit) if prompt.messages else prompt.text
                written.append((prompt, text))
            except Rejected as rejected:
                written.append((prompt, rejected))
            if time.monotonic() >= until:
                break
    return written


def _tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], written: Sequence[str | Rejected]
) -> list[list[int] | DataError]:
    """[P] the tokens of each prompt's text, or why it has none."""
    encoded: list[list[int] | Rejected] = [[] if isinstance(text, str) else text for text in written]
    texts = {row: text for row, text in enumerate(written) if isinstance(text, str)}
    chats = {row: text for row, text in texts.items() if prompts[row].messages}
    # A chat template writes <bos> itself.
    for encoder, rows in ((plain, chats), (begun, {row: texts[row] for row in texts if row not in chats})):
        for row, ids in zip(rows, encoder(tokenizer, list(rows.values())), strict=True):
            encoded[row] = ids
    return [_told(prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True)]


def _told(prompt: Prompt, ids: list[int] | Rejected) -> list[int] | DataError:
    if isinstance(ids, Rejected):
        return DataError(f"prompt {prompt.index}: {ids}")
    return ids or DataError(
        f"prompt {prompt.index} ({prompt.text!r}) has no tokens, so the model has nothing to continue"
    )


# ---- texts -----------------------------------------------------------------------------------------------------------


def plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """[n] each text's tokens, without any that the tokenizer adds by itself."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def begun(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """[n] each text's tokens as the beginning of a row: after what the tokenizer puts before a text (its <bos>), unless
    the text begins with that itself. What it puts behind one ends it, and would leave nothing to continue."""
    encoded = plain(tokenizer, texts)
    before = _put_before(tokenizer, texts[0]) if encoded else []
    return [ids if ids[: len(before)] == before else before + ids for ids in encoded]


def _put_before(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens that the tokenizer puts before a text. They are found with an ordinary one, or else with `text`."""
    for probe in (*PROBES, text):
        (inner,), whole = plain(tokenizer, [probe]), tokenizer(probe)["input_ids"]
        places = [at for at in range(len(whole)) if inner and whole[at : at + len(inner)] == inner]
        if places:
            return list(whole[: places[0]])
    return []


def behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text that follows another one, such that the two decode to exactly both texts together.

    Some tokenizers put a space before each text that they are given (sentencepiece's), which would then stand between.
    """
    (ids,) = plain(tokenizer, [text])
    for anchor in ANCHORS:
        before, whole = plain(tokenizer, [anchor, anchor + text])
        wanted = _decoded(tokenizer, whole)
        if not before:
            continue
        if _decoded(tokenizer, before + ids) == wanted:
            return ids
        if whole[: len(before)] == before:  # else the two grew together where they meet
            return whole[len(before) :]
    return ids


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# ---- chats -----------------------------------------------------------------------------------------------------------


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat, up to where the assistant's answer begins; a last message of the assistant is the beginning
    of that answer. Raises Rejected, saying why."""
    goes_on = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **(options or {}),
        )
    # Templates may reject system messages or roles that do not alternate. They are also programs, and may fail on any
    # input they were not written for, in any way.
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise Rejected(
            f"the tokenizer's chat template rejects its messages ({one_line(error)}); their roles are: {roles}"
        ) from error
    if len(text) > LONGEST_CHAT:
        raise Rejected(
            f"the tokenizer's chat template writes {len(text)} characters for its messages, at most {LONGEST_CHAT} are "
            "allowed"
        )
    return str(text)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: Mapping[str, Any] | None, limit: TimeLimit
) -> str:
    """The text of a prompt's chat. Raises Rejected, and DataError where the template takes too long, as it would for
    the other prompts too."""
    try:
        with limit.each():
            return render(tokenizer, prompt.messages, tools=prompt.tools, options=options)
    except TooLong:
        raise DataError(
            f"prompt {prompt.index}: the tokenizer's chat template takes more than {RENDERED_WITHIN:g} s for its "
            "messages; correct its loops, or set model.tokenizer to another one"
        ) from None


# ---- checks ----------------------------------------------------------------------------------------------------------


def require_encodable(
    source: PromptSource, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> None:
    """Check the first texts of every share, and the arguments of the chat template. Raises ModelError if prompts are
    chats and the tokenizer has no template; ConfigError for an argument that the template does not use; DataError if
    the tokenizer does not know all characters of a prompt. Which chats the template refuses, `unusable` tells."""
    if source.chat and not tokenizer.chat_template:
        raise ModelError(
            "data: the prompts are chats, but the tokenizer has no chat template; use the tokenizer of a chat model "
            "(model.tokenizer), or plain-text prompts with data.chat=false"
        )
    _require_options(source, tokenizer, options or {})
    for share in source.shares:
        prompts = [source.prompt(index) for index in share.train[:LOOKED_AT].tolist()]
        for prompt, ids in zip(prompts, _encoded(tokenizer, prompts, options), strict=True):
            if isinstance(ids, list) and tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
                raise DataError(
                    f"prompt {prompt.index} ({prompt.text!r}) contains characters that the tokenizer does not know: "
                    f"the model would see {tokenizer.decode(ids)!r}; use another tokenizer (model.tokenizer), or list "
                    "all of the prompts' characters in 'characters:...'"
                )


def _require_options(source: PromptSource, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    if options and not source.chat:
        raise ConfigError(
            "data.chat_template_options: set, but no prompt is a chat; set data.chat=true, or remove the table"
        )
    ours = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in options:
        if name in ours or name == "messages":
            raise ConfigError(
                f"data.chat_template_options.{name}: is not the template's own argument; CoreRL sets it; remove it"
            )
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise ConfigError(
                f"data.chat_template_options.{name}: the tokenizer's chat template never reads it; correct its name, "
                "or remove it"
            )


@frozen(kw_only=True)
class Unusable:
    """The prompts of a part of a source that a run cannot use."""

    looked_at: int  # prompts
    refused: Mapping[int, str]  # index -> why: chats that the template refuses or makes nothing of
    too_long: Mapping[int, int]  # index -> tokens


def unusable(
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any] | None = None,
    *,
    longest: int = UNLIMITED,
) -> Iterator[Unusable]:
    """Render every chat once, and encode each prompt that may have more than `longest` tokens. Yields what it finds,
    part by part, in the order of indices."""
    if not source.chat and longest == UNLIMITED:
        return
    prompts = map(source.prompt, np.sort(np.concatenate([source.train, source.held_out])).tolist())
    while found := _written(tokenizer, itertools.islice(prompts, PART), options, seconds=PART_SECONDS):
        nothing = "the tokenizer's chat template writes nothing for its messages"
        refused = {each.index: str(text) or nothing for each, text in found if each.messages and _is_refused(text)}
        doubtful = [(each, text) for each, text in found if isinstance(text, str) and _tokens_at_most(text) > longest]
        encoded = _tokens(tokenizer, [each for each, _ in doubtful], [text for _, text in doubtful])
        lengths = {
            each.index: len(ids) for (each, _), ids in zip(doubtful, encoded, strict=True) if isinstance(ids, list)
        }
        yield Unusable(
            looked_at=len(found),
            refused=refused,
            too_long={index: length for index, length in lengths.items() if length > longest},
        )


def _is_refused(text: str | Rejected) -> bool:
    return isinstance(text, Rejected) or not text


def _tokens_at_most(text: str) -> int:
    """An upper bound, without encoding. A token covers at least one byte of the normalized text, in which a space may
    be three bytes, and another character eleven times as long and have spaces in it."""
    return (4 if text.isascii() else 16) * len(text.encode()) + 16
