"""Resolve a command-line path, of a checkpoint or of a run, to a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def with_checkpoint(what: Path, use: Callable[[Path], Result]) -> Result:
    """The result of `use` with a run's newest checkpoint or, where that or `use` finds it to be damaged, with the one
    before, and a line on stderr for each that is passed over; with any other path as it is. Raises CheckpointError for
    a run whose checkpoints are all damaged."""
    from corerl.checkpoint.commit import latest, passed_over
    from corerl.errors import CheckpointDamaged, CheckpointError
    from corerl.messages import LONGEST_LINE, shorten

    damaged: dict[Path, str] = {}
    told: set[Path] = set()
    while True:
        newest, lost = latest(what, damaged=damaged), passed_over(what, damaged=damaged)
        if newest is None:
            for fault in lost.values():
                raise CheckpointError(f"{what} is a run directory without an intact checkpoint: {fault}")
            return use(what)
        for path, fault in lost.items():
            if path not in told:
                print(
                    f"corerl: skipping {path.name}, using {newest.name}: {shorten(fault, LONGEST_LINE)}",
                    file=sys.stderr,
                )
        told |= lost.keys()
        try:
            return use(newest)
        except CheckpointDamaged as error:
            damaged[newest] = error.message
