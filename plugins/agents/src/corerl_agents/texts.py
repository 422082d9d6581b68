"""The texts of a conversation: where an answer's reasoning ends, and the tokens of a text that follows another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from corerl.models import plain
from corerl.rollout import OPENING, TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Closing tags that mean nothing else, so that text before one is reasoning even if no tag opened it.
CLOSING = re.compile("|".join(re.escape(tag) for tag in TAGS.values() if "/" in tag or "END" in tag))
ANCHORS = ("\n", ".", "a", "0")  # put before a text, to see how it is encoded behind another


def bounds(text: str, opened: str) -> tuple[int, int, int]:
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
    return bounds(text, opened)[2]


def split(text: str, opened: str = "") -> tuple[str, str]:
    """The reasoning that begins an answer, without its tags, and the rest, both stripped."""
    begin, end, rest = bounds(text, opened)
    return text[begin:end].strip(), text[rest:].strip()


class FollowingTexts:
    """Encodes texts that follow others in a row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchors = {
            anchor: (ids, self._decoded(ids))
            for anchor, ids in zip(ANCHORS, plain(tokenizer, ANCHORS), strict=True)
            if ids
        }

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that follows another one, such that nothing is between the two when they are
        decoded.

        Some tokenizers put a space before each text that they are given (sentencepiece's), which would then be
        between. A space that such a tokenizer puts behind a special token inside a text stays, as in a text that begins
        a row.
        """
        (ids,) = plain(self._tokenizer, [text])
        for anchor, (before, decoded) in self._anchors.items():
            joined = self._decoded(before + ids)
            if joined == decoded + text:  # as most tokenizers have it
                return ids
            (whole,) = plain(self._tokenizer, [anchor + text])
            if joined == self._decoded(whole):
                return ids
            if whole[: len(before)] == before:  # else the two grew together where they meet
                return whole[len(before) :]
        return ids

    def token(self, token: int) -> str:
        """The text of a token that follows another one, with the space that it may begin with; "" for one that the
        tokenizer does not have."""
        before, decoded = next(iter(self._anchors.values()), ([], ""))
        return self._decoded([*before, token]).removeprefix(decoded)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
