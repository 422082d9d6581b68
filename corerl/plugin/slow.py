"""Slow paths that backends have in common, with their prices. Imports nothing heavy, since specs need it.

Prices are of whole steps, of `python -m benchmarks.slow_paths` on an H100: docs/models.md has the table of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from corerl.config.schema import ClusterInfo
from corerl.kinds import InPieces, ModelSize
from corerl.plugin.spec import UNMEASURED, SlowPath

IN_PIECES: Mapping[InPieces, str] = {
    InPieces.HEADS: "a step takes 1.2 times as long",
    InPieces.SINKS: "a step takes 1.1 times as long",
    InPieces.CAPS: "a step takes 1.2 times as long",
    InPieces.STATE: UNMEASURED,
}


def slow_attention(cluster: ClusterInfo, size: ModelSize) -> Iterator[SlowPath]:
    """What packed attention costs where it is more than one kernel for the sake of the model."""
    packed = cluster.train is None or cluster.train.layout != "whole"
    why = size.in_pieces
    if packed and why is not None and why in IN_PIECES:
        yield SlowPath(
            path=".model",
            text=f"attention runs on padded rows instead of one kernel over packed tokens, because {why}",
            price=IN_PIECES[why],
            instead="no setting avoids it, only another model",
        )
