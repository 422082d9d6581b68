"""Encode prompts as tokens: texts with the tokenizer's special tokens, chats with its chat template."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from corerl.data.prompts import Prompt, PromptSource
from corerl.errors import DataError, ModelError
from corerl.messages import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LOOKED_AT = 64  # prompts of each source that are checked before a run starts
BATCH = 1024  # prompts encoded at once


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """[P] each prompt's tokens, up to where the response begins.

    Raises DataError if a prompt has no tokens, or if the template refuses a chat.
    """
    encoded: list[list[int]] = [[]] * len(prompts)
    for chat in (False, True):
        rows = [row for row, prompt in enumerate(prompts) if bool(prompt.messages) is chat]
        texts = [_rendered(tokenizer, prompts[row]) if chat else prompts[row].text for row in rows]
        if texts:
            # A chat template writes <bos> itself.
            tokens = tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)["input_ids"]
            for row, ids in zip(rows, tokens, strict=True):
                encoded[row] = ids
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise DataError(
                f"prompt {prompt.index} ({prompt.text!r}) has no tokens, so the model has nothing to continue"
            )
    return encoded


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    messages = [dict(message) for message in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Templates may reject system messages or roles that do not alternate. They are also programs, and may fail on any
    # input they were not written for.
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise DataError(
            f"prompt {prompt.index}: the tokenizer's chat template rejects its messages ({one_line(error)}); their "
            "roles are: " + ", ".join(str(message["role"]) for message in messages)
        ) from error
    return str(text)


def require_encodable(source: PromptSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the first prompts of every share. Raises ModelError if prompts are chats and the tokenizer has no template;
    DataError if the template refuses a prompt, or the tokenizer does not know all of its characters."""
    if source.chat and not tokenizer.chat_template:
        raise ModelError(
            "data: the prompts are chats, but the tokenizer has no chat template; use the tokenizer of a chat model "
            "(model.tokenizer), or plain-text prompts with data.chat=false"
        )
    for share in source.shares:
        prompts = [source.prompt(int(index)) for index in share.train[:LOOKED_AT]]
        for prompt, ids in zip(prompts, encode(tokenizer, prompts), strict=True):
            if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
                raise DataError(
                    f"prompt {prompt.index} ({prompt.text!r}) contains characters that the tokenizer does not know: "
                    f"the model would see {tokenizer.decode(ids)!r}; use another tokenizer (model.tokenizer), or list "
                    "all of the prompts' characters in 'characters:...'"
                )


def longer_than(limit: int, source: PromptSource, tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """The prompts of more than `limit` tokens: index -> tokens. Encodes only those that might be longer."""
    indices = np.concatenate([source.train, source.held_out])
    found: dict[int, int] = {}
    for first in range(0, len(indices), BATCH):
        prompts = [source.prompt(index) for index in indices[first : first + BATCH].tolist()]
        doubtful = [prompt for prompt in prompts if _tokens_at_most(prompt, tokenizer) > limit]
        if doubtful:
            lengths = [len(ids) for ids in encode(tokenizer, doubtful)]
            found |= {prompt.index: n for prompt, n in zip(doubtful, lengths, strict=True) if n > limit}
    return found


def _tokens_at_most(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> float:
    """An upper bound, without encoding. A token covers at least one byte of the normalized text, which may be longer
    than the text itself; a chat template adds at most its own length around each plain message."""
    if not prompt.messages:
        return 4 * len(prompt.text.encode()) + 16
    if any(message.keys() != {"role", "content"} for message in prompt.messages):
        return math.inf
    template = len(str(tokenizer.chat_template))
    return sum(4 * len(message["content"].encode()) + template for message in prompt.messages) + template
