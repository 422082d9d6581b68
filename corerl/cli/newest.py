"""Resolve a command-line path, of a checkpoint or of a run, to a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path


def checkpoint_of(what: Path) -> Path:
    """A run's newest whole checkpoint, with a line on stderr for each newer one; any other path as it is. Raises
    CheckpointError for a run whose checkpoints are all damaged."""
    from corerl.checkpoint.commit import latest, passed_over
    from corerl.errors import CheckpointError
    from corerl.messages import shorten

    newest, damaged = latest(what, read=True), passed_over(what, read=True)
    if newest is None:
        for fault in damaged.values():
            raise CheckpointError(f"{what} is a run directory without an intact checkpoint: {fault}")
        return what
    for path, fault in damaged.items():
        print(f"corerl: skipping {path.name}, using {newest.name}: {shorten(fault, 800)}", file=sys.stderr)
    return newest
