"""Prompts as tokens: a text with the tokenizer's own special tokens, a chat by the tokenizer's chat template."""

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


LOOKED_AT = 64  # prompts of each source, before a run starts
BATCH = 1024  # prompts that are encoded together


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """[P] the tokens of each prompt, up to where the response begins.

    Raises DataError for a prompt of no tokens, and for a chat that the template refuses.
    """
    encoded: list[list[int]] = [[]] * len(prompts)
    for chat in (False, True):
        rows = [row for row, prompt in enumerate(prompts) if bool(prompt.messages) is chat]
        texts = [_rendered(tokenizer, prompts[row]) if chat else prompts[row].text for row in rows]
        if texts:
            # A template writes its <bos> itself.
            tokens = tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)["input_ids"]
            for row, ids in zip(rows, tokens, strict=True):
                encoded[row] = ids
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise DataError(f"prompt {prompt.index} ({prompt.text!r}) has no tokens; there is nothing to continue")
    return encoded


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    messages = [dict(message) for message in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Templates refuse a system message, or roles that do not take turns; and they are programs, which fail at what they
    # were not written for.
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise DataError(
            f"prompt {prompt.index}: the tokenizer's chat template refuses its messages ({one_line(error)}); their "
            "roles are: " + ", ".join(str(message["role"]) for message in messages)
        ) from error
    return str(text)


def require_encodable(source: PromptSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError where prompts are chats and the tokenizer has no template, DataError where that refuses one of
    the first prompts of a share, or where the tokenizer does not know all of its characters."""
    if source.chat and not tokenizer.chat_template:
        raise ModelError(
            "data: there are chat prompts, and the tokenizer has no chat template; take the tokenizer of a chat model "
            "(model.tokenizer), or prompts that are texts, with data.chat=false"
        )
    for share in source.shares:
        prompts = [source.prompt(int(index)) for index in share.train[:LOOKED_AT]]
        for prompt, ids in zip(prompts, encode(tokenizer, prompts), strict=True):
            if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
                raise DataError(
                    f"prompt {prompt.index} ({prompt.text!r}) has characters that the tokenizer does not know: the "
                    f"model would see {tokenizer.decode(ids)!r}; take another tokenizer (model.tokenizer), or name "
                    "all of the prompts' characters in 'characters:...'"
                )


def longer_than(limit: int, source: PromptSource, tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """The prompts of more than `limit` tokens: index -> tokens. Only those that might be are encoded."""
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
    """More than the prompt has. A token stands for a byte or more, of a text that normalization may lengthen; a chat
    template writes no more than itself around each message that is a mere text."""
    if not prompt.messages:
        return 4 * len(prompt.text.encode()) + 16
    if any(message.keys() != {"role", "content"} for message in prompt.messages):
        return math.inf
    template = len(str(tokenizer.chat_template))
    return sum(4 * len(message["content"].encode()) + template for message in prompt.messages) + template
