"""Experts in a step: those that a micro-batch's column `routed_experts` names, the loss that balances their load, and
metrics of that load."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from corerl.backend.batches import counted, unpadded
from corerl.errors import ModelError, Unsupported
from corerl.models.routing import Routed, Routers
from corerl.ops.packing import upload
from corerl.types import BoolArray, Metric, MicroBatch, Output, Reduction

COLUMN = Output.ROUTED_EXPERTS.value
AUX_LOSS = "moe/aux_loss"  # the metric: a sum over micro-batches and ranks


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
        raise routers.unreadable()
    free = free_tokens(micro, layers=routers.layers, topk=routers.topk, experts=routers.experts)
    column = micro.columns[COLUMN]
    return upload(column if free is None else np.where(free[:, :, None], -1, column), device)


def load_balancing_loss(logits: Sequence[Tensor], counts: Tensor, *, topk: int) -> Tensor:
    """[] experts * sum_i f_i P_i, of the logits [T, experts] of each layer and of the tokens that `counts` [T] bool.

    f_i is the mean number of times that a token of a layer has expert i among its `topk` most likely ones, without
    gradient, and P_i the mean probability of i, both over the tokens of all layers: `topk` if the load is even. This is
    transformers' `load_balancing_loss_func` with a mask, in float32 (Fedus et al. 2021, "Switch Transformers", eq. 4-6,
    with the layers taken together).
    """
    experts, weights = logits[0].shape[-1], counts.float()
    load = likely = torch.zeros(experts, device=weights.device)
    for each in logits:
        probabilities = each.float().softmax(-1)
        index = probabilities.detach().topk(topk).indices
        load = load.scatter_add(0, index.flatten(), weights.repeat_interleave(topk))
        likely = likely + (probabilities * weights[:, None]).sum(0)  # a product of matrices may round to TF32
    rows = (weights.sum() * len(logits)).clamp(min=1)
    return experts * ((load / rows) @ (likely / rows))


def require_balance(coef: float, *, layers: int, tokens: int) -> None:
    """Raise Unsupported or ModelError if the balancing loss cannot be added to a step of `tokens` tokens, 0 if not
    known, in a model with `layers` known routers. `coef` 0 leaves it out."""
    if not coef:
        return
    if not tokens:
        raise Unsupported(
            f"a part of a step got train.aux_loss_coef={coef:g}, expected 0: that loss weighs tokens by how many the "
            "whole step has, which a part does not know; pass all of the step's samples in one call, or set "
            "train.aux_loss_coef to 0"
        )
    if not layers:
        raise ModelError(f"train.aux_loss_coef={coef:g}, but the model has no known routers; set it to 0")


@define(kw_only=True, eq=False)
class ExpertLoad:
    """The load of experts in one rank's micro-batches of a step, and with `coef` the step's balancing loss.

    That loss is a mean over micro-batches by their tokens, on all ranks: each is balanced by itself, as the load of
    other micro-batches is not known yet in its backward pass.
    """

    routers: Routers
    coef: float
    step_tokens: int  # on all dp ranks
    _load: Tensor | None = field(default=None, init=False)  # [layers, experts]
    _losses: list[Tensor] = field(factory=list, init=False)  # each [], its part of the step's

    def add(self, micro: MicroBatch, routed: Routed | None = None) -> Tensor | None:
        """Count the experts of a micro-batch, from `routed` or else from the pass that has just ended; returns what it
        adds to the loss, None if nothing."""
        routed = routed or self.routers.take(logits=self.coef != 0)
        every = [*routed.logits, *routed.chosen]
        if not every:
            return None
        counts = upload(counted(micro), every[0].device)
        if len(routed.chosen) == self.routers.layers:
            chosen = torch.stack(routed.chosen).flatten(1)  # [layers, T * k]
            often = counts.long().repeat_interleave(routed.chosen[0].shape[-1]).expand_as(chosen)
            empty = torch.zeros(len(chosen), self.routers.experts, dtype=torch.long, device=chosen.device)
            self._load = (empty if self._load is None else self._load).scatter_add(1, chosen, often)
        if not self.coef:
            return None
        loss = load_balancing_loss(routed.logits, counts, topk=self.routers.topk)
        part = loss * (counts.sum() / self.step_tokens)
        self._losses.append(part.detach())
        return self.coef * part

    def metrics(self) -> dict[str, Metric]:
        """Of the step. Called on every rank: one all-reduce."""
        found: dict[str, Metric] = {}
        if self._losses:
            found[AUX_LOSS] = Metric(float(torch.stack(self._losses).sum()), reduction=Reduction.SUM)
        return found if self._load is None else {**found, **metrics_of_load(self._load)}


def metrics_of_load(load: Tensor) -> dict[str, Metric]:
    """Metrics of how often each expert of a layer was chosen, `load` [layers, experts] of this rank's tokens. Called on
    every rank: one all-reduce. Those without an ending are means over layers, the others of the worst layer.

    largest_fraction  of the choices, that fall on one expert; 1 / experts if the load is even
    entropy           of these fractions, in units of log(experts): 1 if the load is even
    unused            experts that no token was sent to
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(load)
    fractions = load.double() / load.sum(1, keepdim=True).clamp(min=1)
    values = {
        "moe/largest_fraction": (fractions.amax(1), Reduction.MAX),
        "moe/entropy": (-torch.xlogy(fractions, fractions).sum(1) / math.log(max(2, load.shape[1])), Reduction.MIN),
        "moe/unused": ((load == 0).sum(1).double(), Reduction.MAX),
    }
    metrics: dict[str, Metric] = {}
    numbers = torch.stack([of_layers for of_layers, _ in values.values()]).tolist()  # one transfer
    for (name, (_, worst)), of_layers in zip(values.items(), numbers, strict=True):
        metrics[name] = Metric(sum(of_layers), len(of_layers))
        extreme = max(of_layers) if worst is Reduction.MAX else min(of_layers)
        metrics[f"{name}_{worst}"] = Metric(extreme, reduction=worst)
    return metrics
