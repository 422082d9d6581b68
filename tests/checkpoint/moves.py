"""A run that goes on elsewhere every two steps, beside one that stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from attrs import evolve

from corerl.checkpoint.commit import begin
from corerl_testing.compare import Tensors, assert_follows, different
from corerl_testing.subject import Checkpoint, Runs

Place: TypeAlias = tuple[str, Mapping[str, Any], int]  # backend, its options, ranks


def assert_moving_follows_staying(runs: Runs, directory: Path, kind: str, places: Sequence[Place]) -> None:
    """Two steps in each place, from the checkpoint of the one before: what is loaded equals what was saved to the last
    bit, and the whole run follows one on the plain backend that never stops."""
    stays = runs.trained_as(1, runs.setup("plain", kind), 2 * len(places))
    resume, losses, grad_norms = "", list[float](), list[float]()
    saved: Mapping[str, Tensors] = {}
    for number, (backend, options, ranks) in enumerate(places):
        first = 2 * number
        checkpoint = Checkpoint(begin(directory, first + 2), ranks)
        setup = evolve(runs.setup(backend, kind), options=options)
        saving = {"save_after": first + 1, "save_to": checkpoint.role}
        found = runs.train(ranks, setup, range(first, first + 2), resume=resume, **saving)
        assert (found.optimizer_step, found.adam_step) == (first, first + 2)
        assert not resume or different(found.at_start, saved) == []
        saved, resume = found.state, checkpoint.complete()
        losses += found.losses
        grad_norms += found.grad_norms
    assert_follows(evolve(found, losses=losses, grad_norms=grad_norms), stays)
