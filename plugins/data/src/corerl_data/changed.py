"""Rows that are not a checkpoint's, or in another order: how a resumed run goes on with them."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from corerl.data import MixtureComponent, PromptSource, split
from corerl.errors import CheckpointError
from corerl.types import IntArray, UIntArray


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
    source.divide([_held_out_again(each, named.get(each.name, held_out), trained) for each in source.components])
    components = source.components
    same = [each.weight for each in before] == [each.weight for each in components]  # whatever they are called now
    # One step off, the batch in flight may be of a later epoch.
    positions = (state["source"].get("sampled") or position)["sources"]
    went_on = []
    if same and position["seed"] == seed:
        went_on = [_with_added(*each) for each in zip(components, before, (s["epoch"] for s in positions), strict=True)]
    if went_on and all(each is not None for each in went_on):
        source.divide([each for each in went_on if each is not None])
        source.continues = record["identity"]
        return list(_lines(source.components, before)), ""
    changes = list(_changes(components, before, trained, held_out))
    if position["seed"] != seed:
        changes.append(f"run.seed: {seed} (was {position['seed']})")
    source.replaces = record["identity"]
    return [], "; ".join(changes) or "rows are in other sources"


def _held_out_again(component: MixtureComponent, held_out: UIntArray, trained: UIntArray) -> MixtureComponent:
    """Hold out as many rows as before: first those that the checkpoint held out, in its order, then those that it did
    not train on."""
    rank = np.where(np.isin(component.digests, trained), len(held_out) + 1, len(held_out))
    found = places(held_out, component.digests)
    rank[found[found >= 0]] = np.flatnonzero(found >= 0)
    order = component.order[np.argsort(rank[component.order], kind="stable")]
    again = split(component.digests, order, held_out=len(component.held_out), name=component.name)
    return evolve(component, train=again.train + component.first, held_out=again.held_out + component.first)


def _with_added(component: MixtureComponent, before: Recorded, epoch: int) -> MixtureComponent | None:
    """The component with its training rows in the checkpoint's order, and those behind that are new; None unless all
    that was trained on or held out still is."""
    digests = component.digests_of(component.train)
    rows = places(before.rows, digests)
    held_out = places(before.held_out, component.digests_of(component.held_out))
    if (rows < 0).any() or (held_out < 0).any():
        return None
    new = np.setdiff1d(np.arange(len(digests)), rows, assume_unique=True)
    added = (*before.added, (epoch, len(new))) if len(new) else before.added
    return evolve(component, train=component.train[np.concatenate([rows, new])], added=added)


def _lines(components: Sequence[MixtureComponent], before: Sequence[Recorded]) -> Iterator[str]:
    """What changed in data that a run can continue with."""
    for component, old in zip(components, before, strict=True):
        of = f"data of source {component.name!r}" if component.name else "data"
        if new := len(component.train) - len(old.rows):
            yield f"{of}: new rows: {new}; they come at the end of this epoch"
        if held_out := len(component.held_out) - len(old.held_out):
            yield f"{of}: new rows that are held out: {held_out}"


def _changes(
    components: Sequence[MixtureComponent], before: Sequence[Recorded], trained: UIntArray, held_out: UIntArray
) -> Iterator[str]:
    """How data differ that a run cannot continue with."""
    settings = {
        "data.sources": [
            ", ".join(f"{each.name or 'one source'} {each.weight:g}" for each in side) for side in (components, before)
        ],
        "data.held_out": [", ".join(str(len(each.held_out)) for each in side) for side in (components, before)],
    }
    yield from (f"{name}: {now} (was {then})" for name, (now, then) in settings.items() if now != then)
    digests, known = np.concatenate([each.digests for each in components]), np.concatenate([trained, held_out])
    new, gone = int((~np.isin(digests, known)).sum()), int((places(known, digests) < 0).sum())
    if new or gone:
        yield f"{new} of {len(digests)} rows are new, {gone} of {len(known)} are gone"
    if taken := sum(int(np.isin(each.digests_of(each.held_out), trained).sum()) for each in components):
        yield f"rows that were trained on and are held out now: {taken}"


def places(wanted: UIntArray, among: UIntArray) -> IntArray:
    """Where each of the `wanted` is `among` the others, or -1: the k-th of equal ones at the k-th place of those."""
    own, other = np.argsort(wanted, kind="stable"), np.argsort(among, kind="stable")
    ordered, there = wanted[own], among[other]
    copy = np.arange(len(wanted)) - np.searchsorted(ordered, ordered)  # its number among equal ones
    at = np.searchsorted(there, ordered) + copy
    found = at < np.searchsorted(there, ordered, side="right")
    result = np.full(len(wanted), -1, dtype=np.int64)
    result[own[found]] = other[at[found]]
    return result


def unpacked(text: str) -> UIntArray:
    try:
        steps = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype="<u8")
    except (ValueError, binascii.Error, zlib.error) as error:
        raise CheckpointError(f"digests of rows cannot be read ({error}); resume from another checkpoint") from error
    return np.cumsum(steps, dtype=np.uint64)
