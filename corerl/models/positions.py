"""Find out beyond which length a model has no positions, because it looks them up in a table."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from corerl.models.config import context_length

OFFSET = 2  # rows that OPT's table has before its first position


def position_rows(model: PreTrainedModel) -> int | None:
    """The number of positions in the model's table, learned or made of sines; None if it has no table."""
    positions = context_length(model.config)
    if positions is None:
        return None
    words = model.get_input_embeddings()
    learned = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    made = [buffer.shape[0] for buffer in model.buffers() if buffer.dim() == 2]
    return positions if any(positions <= rows <= positions + OFFSET for rows in (*learned, *made)) else None
