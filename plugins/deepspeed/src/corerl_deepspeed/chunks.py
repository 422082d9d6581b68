"""DeepSpeed's part of the chunk map: the boxes of HF tensors in a flat range of a parameter's elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from corerl.models import HFBox, local_chunks
from corerl.weights import Chunk, flat_range_views
from corerl_deepspeed.state import Piece


def piece_chunks(
    pieces: Iterable[Piece], boxes: Mapping[str, Sequence[HFBox]], *, replica: bool = False
) -> list[Chunk]:
    return [
        chunk
        for piece in pieces
        for (offsets, sizes), view in flat_range_views(piece.shape, piece.start, piece.values)
        for chunk in local_chunks(boxes[piece.name], offsets, sizes, view, replica=replica)
    ]
