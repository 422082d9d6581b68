"""Resolve a command-line path, of a checkpoint or of a run, to a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path


def checkpoint_of(what: Path) -> Path:
    """A run's newest complete checkpoint, with a line on stderr for each newer one; any other path as it is."""
    from corerl.checkpoint.commit import latest, passed_over
    from corerl.messages import printable

    newest = latest(what, read=True)
    if newest is None:
        return what
    for path, fault in passed_over(what, read=True).items():
        print(f"corerl: skipping {path.name}, using {newest.name}: {printable(fault)}", file=sys.stderr)
    return newest
