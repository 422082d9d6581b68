"""What of an answer is known while it is sampled, whatever follows."""

from __future__ import annotations

from collections.abc import Sequence

from corerl.rollout import OPENING, TAGS
from corerl_agents.texts import bounds

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # as tokens are decoded that end within a character


def before(text: str, marks: Sequence[str]) -> str:
    """The text before the first of these marks, or before what may be the beginning of one at its end."""
    end = min((at for at in map(text.find, marks) if at >= 0), default=len(text))
    return text[:end] if end < len(text) else text[: len(text) - _begun(text, marks)]


def _begun(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return max(
        (length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length])),
        default=0,
    )


def known(text: str, opened: str, marks: Sequence[str], *, stops: Sequence[str], apart: bool) -> tuple[str, str]:
    """The reasoning and the content of an answer that begins with `text`, as far as both are known. `opened`: the
    reasoning tag that is open before it. `marks`: texts from which on nothing is content; `stops` of them end reasoning
    too. With `apart` the content has no reasoning."""
    if not apart:
        return "", before(text, marks)
    said = text.lstrip()
    if not said or any(tag.startswith(said) for tag in TAGS):
        return "", ""
    begin, end, rest = bounds(text, opened)
    if not rest:
        return "", before(text, marks)
    if rest == end:  # not closed
        tag = OPENING.match(opened) or OPENING.match(said)
        assert tag is not None
        return before(text[begin:], [TAGS[tag[0]], *stops]).strip(), ""
    reasoning = text[begin:end].strip()
    # An answer whose reasoning is empty is sent with its tags.
    return reasoning, before(text[rest:], marks).lstrip() if reasoning else before(text, marks)


def shared(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]
