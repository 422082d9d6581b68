"""End samples at texts: engines know only tokens, so what they sample is searched as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from corerl.engines.base import GENERATION_TOKENS, GenerateRequest, Generation, OnFinished, Watch, ignore
from corerl.models.tokenizer import plain, special_tokens
from corerl.types import IntArray, offsets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Stops:
    """Stop texts, each of any length. A sample ends with the token that completes the first of them, whatever else that
    token says, and its text ends where the stop text begins."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        special = special_tokens(tokenizer)
        # A special token's name is no text of the policy's, unless a stop text asks for it.
        self._special = any(name in text for name in special.values() for text in texts)
        self._silent = frozenset() if self._special else frozenset(special)
        # Tokens that a stop text may span, besides silent ones: each is at least one byte, and some may be none.
        self._span = 4 * max((len(text.encode()) for text in texts), default=0) + 16

    def end(self, tokens: Sequence[int], known: int = 0) -> int | None:
        """How many of a response's tokens it takes until their text has a stop text; None if all together have none.
        The first `known` are known to have none."""
        skipped = self._begin(tokens, known)
        window = list(tokens[skipped:])
        if self._place(window) is None:
            return None
        low, high = known - skipped, len(window)  # `low` tokens have none, `high` have one
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._place(window[:middle]) is None else (low, middle)
        return skipped + high

    def _begin(self, tokens: Sequence[int], known: int) -> int:
        """Where a stop text that is not complete in the first `known` tokens can have begun at the earliest."""
        begin, span = known, self._span
        while begin and span:
            begin -= 1
            span -= tokens[begin] not in self._silent
        return begin

    def text(self, tokens: Sequence[int], *, special_tokens: bool) -> str:
        """A response's text before its first stop text, with or without its special tokens."""
        place = self._place(tokens)
        if place is None:
            return self._decoded(tokens, special_tokens)
        whole = self._decoded(tokens, self._special)
        if special_tokens == self._special:
            return whole[:place]
        before = len(tokens)  # tokens that lie entirely before the stop text
        while len(said := self._decoded(tokens[:before], self._special)) > place:
            before -= 1
        return self._decoded(tokens[:before], special_tokens) + whole[len(said) : place]

    def _place(self, tokens: Sequence[int]) -> int | None:
        """Where the first stop text begins."""
        if not self._texts:
            return None
        text = self._decoded(tokens, self._special)
        return min((at for at in map(text.find, self._texts) if at >= 0), default=None)

    def _decoded(self, tokens: Sequence[int], special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special_tokens))


def stops_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[str]]:
    """Stop texts as tokens where a single one says it, which every engine ends at by itself, and the others as texts.
    Raises ValueError for a text that no response can contain."""
    tokens: list[int] = []
    rest: list[str] = []
    for text in texts:
        if not text:
            raise ValueError("'' is an empty text, which every response begins with; remove it")
        (ids,) = plain(tokenizer, [text])
        if not ids or tokenizer.unk_token_id in ids:
            raise ValueError(
                f"{text!r} is {tokenizer.convert_ids_to_tokens(ids)} for this tokenizer, which does not know all of "
                "it, so that no response can contain it; correct or remove it"
            )
        token = _only_token(text, ids, tokenizer)
        if token is None:
            rest.append(text)
        else:
            tokens.append(token)
    return tokens, rest


def _only_token(text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token without which no response has this text: a token by its name, or the only one with a character."""
    if len(ids) > 1:
        return None
    if text in tokenizer.get_added_vocab():
        return ids[0]
    piece = tokenizer.convert_ids_to_tokens(list(ids))[0]
    if not text.isascii() or not len(text) == len(piece) == 1:
        return None
    special = set(special_tokens(tokenizer).values())
    holders = [token for token in tokenizer.get_vocab() if piece in token and token not in special]
    return ids[0] if len(holders) == 1 else None


def until_stop(
    generate: Callable[[GenerateRequest, Watch, OnFinished], Generation],
    request: GenerateRequest,
    stops: Stops,
    on_finished: OnFinished = ignore,
) -> Generation:
    """Complete the rows, ending each at the first stop text. `generate` is an engine's `generate_watched`, whose noise
    does not depend on how it is watched, so these are the tokens of one whole request."""
    answers = zip(request.by_row(), request.answered.tolist(), strict=True)
    said = [tokens[len(tokens) - answered :].tolist() for tokens, answered in answers]  # of each answer
    ends: dict[int, int] = {}  # row -> how many of its tokens it takes until it has a stop text

    def look(row: int, tokens: Sequence[int]) -> bool:
        """Whether a row has a stop text with these tokens more."""
        if row not in ends:
            known = len(said[row])
            said[row].extend(tokens)
            if (end := stops.end(said[row], known)) is not None:
                ends[row] = end - int(request.answered[row])
        return row in ends

    generated = generate(request, look, on_finished)
    sizes = np.diff(generated.offsets)
    kept, stopped = sizes.copy(), np.zeros(len(sizes), dtype=np.bool_)
    for row, end in ends.items():
        kept[row], stopped[row] = end, True
    experts = generated.routed_experts
    if experts is not None:
        prompts = np.diff(request.offsets)
        experts = experts[_first(prompts + sizes, prompts + kept)]
        ends_of_rows = offsets_of(prompts + kept)[1:]
        experts[ends_of_rows[kept < sizes] - 1] = -1  # as of a row's last token, which no pass has read
    chosen = _first(sizes, kept)
    return evolve(
        generated,
        **{name: getattr(generated, name)[chosen] for name in GENERATION_TOKENS},
        offsets=offsets_of(kept),
        truncated=generated.truncated & ~stopped,
        unfinished=generated.unfinished & ~stopped,
        routed_experts=experts,
    )


def _first(sizes: IntArray, kept: IntArray) -> IntArray:
    """Indices of the first `kept` of each row's `sizes` elements, which stand one row after the other."""
    within = np.arange(sizes.sum()) - np.repeat(offsets_of(sizes)[:-1], sizes)
    return np.flatnonzero(within < np.repeat(kept, sizes))
