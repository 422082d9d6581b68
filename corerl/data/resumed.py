"""Compare a run's rows with its checkpoint's on resume, and hold out the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from corerl.data.digests import places, unpacked
from corerl.data.prompts import PromptSource, Share, split
from corerl.types import UIntArray


@frozen(kw_only=True, eq=False)
class Recorded:
    """What a checkpoint says of the rows of one source."""

    name: str
    weight: float
    rows: UIntArray  # [t] digests of training rows, in the order that epochs permute
    held_out: UIntArray  # [h]
    added: tuple[tuple[int, int], ...]


def resume_data(source: PromptSource, state: Mapping[str, Any], *, seed: int) -> tuple[list[str], str]:
    """Divide the rows of a source as a checkpoint's `state` did.

    What was held out stays so, and further rows are held out only as far as the checkpoint did not train on them. If
    all of its rows are there, in any order, its positions remain valid, and rows that were added come at the end
    of the epoch: returns what to say of that. Otherwise the source begins at its first prompt; returns what differs.
    """
    record, position = state["data"], state["source"]["prompts"]
    before = [
        Recorded(
            name=each["name"],
            weight=each["weight"],
            rows=unpacked(each["rows"]),
            held_out=unpacked(each["held_out"]),
            added=tuple((added["epoch"], added["rows"]) for added in each["added"]),
        )
        for each in record["sources"]
    ]
    trained = np.concatenate([each.rows for each in before])
    held_out = np.concatenate([each.held_out for each in before])
    named = {each.name: each.held_out for each in before}
    source.divide([_held_out_again(share, named.get(share.name, held_out), trained) for share in source.shares])
    shares = source.shares
    same = [each.weight for each in before] == [share.weight for share in shares]  # whatever they are called now
    # One step off, the batch in flight may be of a later epoch.
    positions = (state["source"].get("sampled") or position)["sources"]
    went_on = []
    if same and position["seed"] == seed:
        went_on = [_with_added(*each) for each in zip(shares, before, (s["epoch"] for s in positions), strict=True)]
    if went_on and all(share is not None for share in went_on):
        source.divide([share for share in went_on if share is not None])
        source.continues = record["identity"]
        return list(_lines(shares, source.shares, before)), ""
    changes = list(_changes(shares, before, trained, held_out))
    if position["seed"] != seed:
        changes.append(f"run.seed is {seed} (was {position['seed']})")
    source.replaces = record["identity"]
    return [], "; ".join(changes) or "rows are in other sources"


def _held_out_again(share: Share, held_out: UIntArray, trained: UIntArray) -> Share:
    """Hold out as many rows as before: first those that the checkpoint held out, in its order, then those that it did
    not train on."""
    rank = np.where(np.isin(share.digests, trained), len(held_out) + 1, len(held_out))
    found = places(held_out, share.digests)
    rank[found[found >= 0]] = np.flatnonzero(found >= 0)
    order = share.order[np.argsort(rank[share.order], kind="stable")]
    again = split(share.digests, order, held_out=len(share.held_out), name=share.name)
    return evolve(share, train=again.train + share.first, held_out=again.held_out + share.first)


def _with_added(share: Share, before: Recorded, epoch: int) -> Share | None:
    """The share with its training rows in the checkpoint's order, and those behind that are new; None unless all that
    was trained on or held out still is."""
    digests = share.digests_of(share.train)
    rows = places(before.rows, digests)
    held_out = places(before.held_out, share.digests_of(share.held_out))
    if (rows < 0).any() or (held_out < 0).any():
        return None
    new = np.setdiff1d(np.arange(len(digests)), rows, assume_unique=True)
    added = (*before.added, (epoch, len(new))) if len(new) else before.added
    return evolve(share, train=share.train[np.concatenate([rows, new])], added=added)


def _lines(fresh: Sequence[Share], shares: Sequence[Share], before: Sequence[Recorded]) -> Iterator[str]:
    """What changed in data that a run can continue with."""
    for unordered, share, old in zip(fresh, shares, before, strict=True):
        new, held_out = len(share.train) - len(old.rows), len(share.held_out) - len(old.held_out)
        if new:
            yield f"data{_of(share)}: new rows: {new}; they come at the end of this epoch"
        if held_out:
            yield f"data{_of(share)}: new rows that are held out: {held_out}"
        if not np.array_equal(unordered.train[: len(old.rows)], share.train[: len(old.rows)]):
            yield f"data{_of(share)}: the rows are in another order than in the checkpoint, whose order is kept"


def _changes(
    shares: Sequence[Share], before: Sequence[Recorded], trained: UIntArray, held_out: UIntArray
) -> Iterator[str]:
    """How data differ that a run cannot continue with."""
    if (now := _mix(shares)) != (then := _mix(before)):
        yield f"the sources are {now} (were {then})"
    digests, known = np.concatenate([share.digests for share in shares]), np.concatenate([trained, held_out])
    new, gone = int((~np.isin(digests, known)).sum()), int((places(known, digests) < 0).sum())
    if new or gone:
        yield f"{new} of {len(digests)} rows are new, {gone} of {len(known)} are gone"
    if taken := sum(int(np.isin(share.digests_of(share.held_out), trained).sum()) for share in shares):
        yield f"rows that were trained on and are held out now: {taken}"
    if freed := sum(int(np.isin(share.digests_of(share.train), held_out).sum()) for share in shares):
        yield f"rows that were held out and are trained on now: {freed}"


def _mix(sources: Iterable[Share | Recorded]) -> str:
    return ", ".join(f"{each.name or 'one'} (weight {each.weight:g})" for each in sources)


def _of(share: Share) -> str:
    return f" of source {share.name!r}" if share.name else ""
