"""The experts that a micro-batch's column `routed_experts` names, and the tokens that choose for themselves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from corerl.backend.batches import unpadded
from corerl.errors import ModelError
from corerl.models.routing import Routers
from corerl.ops.upload import upload
from corerl.types import BoolArray, MicroBatch, Output

COLUMN = Output.ROUTED_EXPERTS.value


def free_tokens(micro: MicroBatch, *, layers: int, topk: int, experts: int) -> BoolArray | None:
    """[T, layers] where tokens choose for themselves: padding, and those of which nothing is known. None where all are
    told. Raises ModelError where the column is none of a model with `layers` of `experts`, `topk` of which a token
    passes."""
    column = micro.columns[COLUMN]
    if column.shape[1:] != (layers, topk):
        raise ModelError(
            f"column {COLUMN!r} has {list(column.shape[1:])} a token, and the model {layers} layers of experts with "
            f"{topk} a token; replay what was recorded of the same model"
        )
    free: BoolArray = (column < 0).any(axis=2) | ~unpadded(micro)[:, None]
    ordered = np.sort(column[~free], axis=1)
    if (ordered[:, -1:] >= experts).any() or (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ModelError(
            f"column {COLUMN!r} wants {topk} different experts a token, numbered 0 to {experts - 1}, or -1 where there "
            "is nothing to replay; replay what was recorded of the same model"
        )
    return free if free.any() else None


def told_experts(routers: Routers, micro: MicroBatch, device: torch.device) -> Tensor | None:
    """[T, layers, k] on `device`, as `Routers.told` takes it; None where the micro-batch names none. Raises ModelError
    where the model's routers are not known, or the column is none of it."""
    if COLUMN not in micro.columns:
        return None
    if not routers.layers:
        raise routers.silent()
    free = free_tokens(micro, layers=routers.layers, topk=routers.topk, experts=routers.experts)
    column = micro.columns[COLUMN]
    return upload(column if free is None else np.where(free[:, :, None], -1, column), device)
