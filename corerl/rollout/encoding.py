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
from corerl.engines.base import UNLIMITED
from corerl.errors import ConfigError, DataError, ModelError
from corerl.messages import one_line
from corerl.models.tokenizer import plain
from corerl.rollout.templates import SHARED, TemplateCostly, TemplateFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LOOKED_AT = 64  # prompts of each source whose characters are checked before a run starts
LOOKED_FOR = 1.0  # seconds after which no other one is: the check of all prompts tells of a template that takes long
PART = 256  # prompts that are looked at together, at most
PART_SECONDS = 0.25  # for which chats of a part are rendered: a check looks at the clock between parts
PROBES = ("0", "a", ".")  # texts of an ordinary token in most vocabularies
ANCHORS = ("\n", ".", "a", "0")  # put before a text, to see how it is encoded behind another


class Rejected(Exception):
    """The chat template refuses messages, or leaves out what is to be continued."""


class Costly(Rejected):
    """The chat template takes more time or memory for messages than it may, as it may do for all others."""


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """[P] each prompt's tokens, up to where the response begins; `options` are arguments of the chat template.

    Raises DataError if a prompt has no tokens, or if the template refuses a chat.
    """
    encoded: list[list[int]] = []
    for ids in _tokens(tokenizer, _written(tokenizer, prompts, options)):
        if isinstance(ids, DataError):
            raise ids
        encoded.append(ids)
    return encoded


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
    for prompt in prompts:
        text: str | Rejected = prompt.text
        if prompt.messages:
            try:
                for name in prompt.template_options:
                    if (wrong := wrong_option(tokenizer, name)) is not None:
                        raise Rejected(f"chat_template_kwargs.{name}: {wrong}, or list the field in data.ignore")
                own = {**(options or {}), **prompt.template_options}
                text = render(tokenizer, prompt.messages, tools=prompt.tools, options=own)
            except Rejected as rejected:
                text = rejected
        written.append((prompt, text))
        if time.monotonic() >= until:
            break
    return written


def _tokens(
    tokenizer: PreTrainedTokenizerBase, written: Sequence[tuple[Prompt, str | Rejected]]
) -> list[list[int] | DataError]:
    """[P] the tokens of each prompt's text, or why it has none."""
    encoded: list[list[int] | Rejected] = [[] if isinstance(text, str) else text for _, text in written]
    chats = {row: text for row, (prompt, text) in enumerate(written) if prompt.messages and isinstance(text, str)}
    texts = {row: prompt.text for row, (prompt, _) in enumerate(written) if not prompt.messages}
    # A chat template writes <bos> itself.
    found = [
        plain(tokenizer, list(chats.values())),
        TextEncoder(tokenizer).begun(list(texts.values())) if texts else [],
    ]
    for row, ids in zip([*chats, *texts], itertools.chain(*found), strict=True):
        encoded[row] = ids
    return [_told(prompt, ids) for (prompt, _), ids in zip(written, encoded, strict=True)]


def _told(prompt: Prompt, ids: list[int] | Rejected) -> list[int] | DataError:
    if isinstance(ids, Rejected):
        return DataError(f"prompt {prompt.index}: {ids}")
    return ids or DataError(
        f"prompt {prompt.index} ({prompt.text!r}) has no tokens, so the model has nothing to continue"
    )


# ---- texts -----------------------------------------------------------------------------------------------------------


class TextEncoder:
    """Encodes texts that begin a row, and texts that follow others, with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before = self._put_before(PROBES)
        self._anchors = {
            anchor: (ids, self._decoded(ids))
            for anchor, ids in zip(ANCHORS, plain(tokenizer, ANCHORS), strict=True)
            if ids
        }

    def begun(self, texts: Sequence[str]) -> list[list[int]]:
        """[n] each text's tokens as the beginning of a row: after what the tokenizer puts before a text (its <bos>), of
        which a text that begins with some of that gets only the rest. What it puts behind one ends it, and would leave
        nothing to continue."""
        before = self._put_before(texts[:1]) if self._before is None else self._before
        return [_begun(ids, before or []) for ids in plain(self._tokenizer, texts)]

    def _put_before(self, texts: Sequence[str]) -> list[int] | None:
        """The tokens that the tokenizer puts before a text, found with the first of these that it knows; None if it
        knows none."""
        for text in texts:
            (inner,), whole = plain(self._tokenizer, [text]), self._tokenizer(text)["input_ids"]
            places = [at for at in range(len(whole)) if inner and whole[at : at + len(inner)] == inner]
            if places:
                return list(whole[: places[0]])
        return None

    def behind(self, text: str) -> list[int]:
        """The tokens of a text that follows another one, such that nothing stands between the two when they are
        decoded.

        Some tokenizers put a space before each text that they are given (sentencepiece's), which would then stand
        between. A space that such a tokenizer puts behind a special token inside a text stays, as in a text that begins
        a row.
        """
        (ids,) = plain(self._tokenizer, [text])
        for anchor, (before, said) in self._anchors.items():
            told = self._decoded(before + ids)
            if told == said + text:  # as most tokenizers have it
                return ids
            (whole,) = plain(self._tokenizer, [anchor + text])
            if told == self._decoded(whole):
                return ids
            if whole[: len(before)] == before:  # else the two grew together where they meet
                return whole[len(before) :]
        return ids

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _begun(ids: list[int], before: list[int]) -> list[int]:
    """The tokens of a text after `before`, of which none is there twice."""
    left = list(before)
    for token in ids:
        if token not in left:
            break
        left.remove(token)
    own = ids[: len(before) - len(left)]
    places = iter(before)
    if all(token in places for token in own):
        return before + ids[len(own) :]
    return ids  # it has them in an order of its own


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
    offered = [dict(tool) for tool in tools] or None
    try:
        return SHARED.render(
            tokenizer.get_chat_template(tools=offered),
            {
                **tokenizer.special_tokens_map,
                **(options or {}),
                "conversations": [[dict(message) for message in messages]],
                "tools": offered,
                "add_generation_prompt": generation_prompt and not goes_on,
                "continue_final_message": goes_on,
            },
        )
    except TemplateCostly as costly:
        raise Costly(f"the tokenizer's chat template {costly} for its messages") from costly
    except (TemplateFailed, ValueError) as error:  # the latter: several templates, and none is the default
        why = one_line(error) if isinstance(error, ValueError) else error
        roles = ", ".join(str(message["role"]) for message in messages)
        raise Rejected(
            f"the tokenizer's chat template rejects its messages ({why}); their roles are: {roles}"
        ) from error


# ---- checks ----------------------------------------------------------------------------------------------------------


def require_encodable(
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any] | None = None,
    *,
    characters: bool = True,
) -> None:
    """Check the arguments of the chat template and, with `characters`, the first texts of every share. Raises
    ModelError if prompts are chats and the tokenizer has no template; ConfigError for an argument that the template
    does not use; DataError if the tokenizer does not know all characters of a prompt. Which chats the template refuses,
    `unusable` tells."""
    if source.chat and not tokenizer.chat_template:
        raise ModelError(
            "data: the prompts are chats, but the tokenizer has no chat template; use the tokenizer of a chat model "
            "(model.tokenizer), or plain-text prompts with data.chat=false"
        )
    _require_options(source, tokenizer, options or {})
    if tokenizer.unk_token_id is None or not characters:
        return
    for share in source.shares:
        prompts = [source.prompt(index) for index in share.train[:LOOKED_AT].tolist()]
        written = _written(tokenizer, prompts, options, seconds=LOOKED_FOR)
        for (prompt, _), ids in zip(written, _tokens(tokenizer, written), strict=True):
            if isinstance(ids, list) and tokenizer.unk_token_id in ids:
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
    for name in options:
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
class Unusable:
    """The prompts of a part of a source that a run cannot use."""

    looked_at: int  # prompts
    refused: Mapping[int, str]  # index -> why: chats that the template refuses, and prompts that have no tokens
    too_long: Mapping[int, int]  # index -> tokens
    costly: int  # prompts among `refused` for which the template takes more time or memory than it may


def unusable(
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any] | None = None,
    *,
    longest: int = UNLIMITED,
    characters: bool = False,
) -> Iterator[Unusable]:
    """Render every chat once, and encode each prompt that may have none or more than `longest` tokens; with
    `characters` every prompt, to refuse those with characters that the tokenizer does not know. Yields what it finds,
    part by part, in the order of indices."""
    unknown = tokenizer.unk_token_id if characters else None
    if not source.chat and longest == UNLIMITED and unknown is None:
        return
    if source.characters is not None and unknown is None and _tokens_at_most("x" * source.characters) <= longest:
        return
    prompts = map(source.prompt, np.sort(np.concatenate([source.train, source.held_out])).tolist())
    while found := _written(tokenizer, itertools.islice(prompts, PART), options, seconds=PART_SECONDS):
        nothing = "the tokenizer's chat template writes nothing for its messages"
        refused = {
            each.index: str(text) or nothing
            for each, text in found
            if each.messages and (isinstance(text, Rejected) or not text)
        }
        doubtful = [
            (each, text)
            for each, text in found
            if isinstance(text, str) and (unknown is not None or not text.strip() or _tokens_at_most(text) > longest)
        ]
        lengths: dict[int, int] = {}
        for (each, _), ids in zip(doubtful, _tokens(tokenizer, doubtful), strict=True):
            if isinstance(ids, DataError):
                refused.setdefault(each.index, ids.message)
            elif unknown in ids:
                refused[each.index] = "it has characters that the tokenizer does not know"
            else:
                lengths[each.index] = len(ids)
        yield Unusable(
            looked_at=len(found),
            refused=refused,
            too_long={index: length for index, length in lengths.items() if length > longest},
            costly=sum(isinstance(text, Costly) for _, text in found),
        )


def _tokens_at_most(text: str) -> int:
    """An upper bound, without encoding. A token covers at least one byte of the normalized text, in which a space may
    be three bytes, and another character eleven times as long and have spaces in it."""
    return (4 if text.isascii() else 16) * len(text.encode()) + 16
