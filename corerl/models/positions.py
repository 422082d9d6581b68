"""Find out beyond which length a model has no positions, as one does that looks them up in a table."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from corerl.models.config import context_length

OFFSET = 2  # rows that OPT's table has before its first position
SHORT = 4  # tokens
LONGEST_TABLE = 2**24  # positions: what allows more has no table, and takes no pass on meta either


def position_limit(model: PreTrainedModel, *, wanted: int) -> int | None:
    """The number of the model's positions, if it cannot take a sequence of `wanted` tokens; None if it can. `model` is
    on meta, which tells nothing of what is looked up beyond a table's end: learned tables are taken for limits, and of
    all else a pass shows whether it is one."""
    positions = context_length(model.config)
    if positions is None or not positions < wanted or positions > LONGEST_TABLE:
        return None
    words = model.get_input_embeddings()
    learned = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    if _fits(learned, positions):
        return positions
    made = _fits(_table_rows(model), positions)
    if not _runs(model, SHORT):  # as models do on meta whose code looks at values
        return positions if made else None
    if not _runs(model, positions + OFFSET + 1):
        return positions
    return positions if made and _fits(_table_rows(model), positions) else None  # else the pass has made a longer one


def _table_rows(model: nn.Module) -> list[int]:
    return [buffer.shape[0] for buffer in model.buffers() if buffer.dim() == 2]


def _fits(rows: list[int], positions: int) -> bool:
    return any(positions <= each <= positions + OFFSET for each in rows)


def _runs(model: PreTrainedModel, tokens: int) -> bool:
    """Whether a pass with so many tokens computes shapes that fit each other."""
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"), use_cache=False)
    except Exception:  # whatever a model's code does with tensors that do not fit, or have no values
        return False
    return True
