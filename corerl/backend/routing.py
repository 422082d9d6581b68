"""Read a micro-batch's column `routed_experts`: the experts it names, and the tokens that it leaves to the router."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from corerl.backend.batches import unpadded
from corerl.errors import ModelError
from corerl.models.routing import Routers
from corerl.ops.transfer import upload
from corerl.types import BoolArray, MicroBatch, Output

COLUMN = Output.ROUTED_EXPERTS.value


def free_tokens(micro: MicroBatch, *, layers: int, topk: int, experts: int) -> BoolArray | None:
    """[T, layers] True where the router chooses: padding, and tokens without recorded experts. None if every token has
    recorded experts. Raises ModelError if the column does not fit a model with `layers` MoE layers of `experts`
    experts, `topk` per token."""
    column = micro.columns[COLUMN]
    if column.shape[1:] != (layers, topk):
        raise ModelError(
            f"column {COLUMN!r} has shape {list(column.shape[1:])} per token, but the model has {layers} layers with "
            f"{topk} experts per token; replay what was recorded with the same model"
        )
    free: BoolArray = (column < 0).any(axis=2) | ~unpadded(micro)[:, None]
    ordered = np.sort(column[~free], axis=1)
    if (ordered[:, -1:] >= experts).any() or (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ModelError(
            f"column {COLUMN!r} must have {topk} different experts per token, numbered 0 to {experts - 1}, or -1 where "
            "there is nothing to replay; replay what was recorded with the same model"
        )
    return free if free.any() else None


def replayed_experts(routers: Routers, micro: MicroBatch, device: torch.device) -> Tensor | None:
    """[T, layers, k] experts on `device`, as `Routers.replaying` takes them; None if the micro-batch has no such
    column. Raises ModelError if the model's routers are not known, or the column does not fit the model."""
    if COLUMN not in micro.columns:
        return None
    if not routers.layers:
        raise routers.silent()
    free = free_tokens(micro, layers=routers.layers, topk=routers.topk, experts=routers.experts)
    column = micro.columns[COLUMN]
    return upload(column if free is None else np.where(free[:, :, None], -1, column), device)
