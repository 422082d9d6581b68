"""DeepSpeed's part of the chunk map: which boxes of which HF tensors a flat run of a parameter's elements is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from corerl.models.names import HFBox, local_chunks
from corerl.weights.chunks import Chunk, flat_range_boxes
from corerl_deepspeed.state import Piece


def piece_chunks(
    pieces: Iterable[Piece], boxes: Mapping[str, Sequence[HFBox]], *, replica: bool = False
) -> list[Chunk]:
    chunks: list[Chunk] = []
    for piece in pieces:
        at = 0
        for offsets, sizes in flat_range_boxes(piece.shape, piece.start, piece.start + piece.values.numel()):
            numel = math.prod(sizes)
            view = piece.values[at : at + numel].view(sizes)
            chunks += local_chunks(boxes[piece.name], offsets, sizes, view, replica=replica)
            at += numel
    return chunks
