"""The loss that balances the load of experts, of which megatron-core's routers add the gradient as they pass it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    reduce_aux_losses_tracker_across_ranks,
)

from corerl.types import Metric, MicroBatch
from corerl_megatron.parallel import Groups

LOSS = "load_balancing_loss"  # megatron-core's name for it


@frozen(kw_only=True)
class Balancing:
    """What one optimizer step does about it.

    A router multiplies its loss by the tokens that it saw, for the whole gradient to be divided by the tokens of the
    step: a mean over tokens. CoreRL's own loss is divided already, so it is multiplied by as many first. Where the
    tokens of a micro-batch are split over several ranks, each router's part of the loss and its tokens are both parts,
    and only one of them may be: such a split divides the tokens of the step too.
    """

    config: TransformerConfig
    scale: float  # what the whole gradient is divided by; 1 where there is nothing to balance

    @classmethod
    def of(cls, config: TransformerConfig, micro_batches: Iterable[MicroBatch], groups: Groups) -> Balancing:
        """Called on every rank; goes over the micro-batches where the loss is asked for."""
        if not config.moe_aux_loss_coeff:
            return cls(config=config, scale=1.0)
        tokens = torch.tensor(float(sum(len(micro.tokens) for micro in micro_batches)), device="cuda")
        torch.distributed.all_reduce(tokens, group=groups.data)
        parts = groups.context.size() * (groups.tensor.size() if config.sequence_parallel else 1)
        return cls(config=config, scale=float(tokens) / parts)

    def __enter__(self) -> Balancing:
        if self.scale != 1.0:
            self.config.grad_scale_func = lambda loss: loss / self.scale
        return self

    def __exit__(self, *exception: Any) -> None:
        self.config.grad_scale_func = None

    def metrics(self, micro_batches: int) -> Mapping[str, Metric]:
        """The mean over layers of experts and micro-batches, 1 where the load is even. Called on every rank."""
        if not self.config.moe_aux_loss_coeff:
            return {}
        tracker = get_moe_layer_wise_logging_tracker()
        # A stage without experts has kept nothing, and takes part in the sum all the same.
        tracker.setdefault(LOSS, {"values": torch.zeros(self.config.num_layers, device="cuda")})
        reduce_aux_losses_tracker_across_ranks([LOSS])
        layers = sum(self.config.moe_layer_freq)
        found = float(tracker[LOSS]["values"].sum())
        clear_aux_losses_tracker()
        return {LOSS: Metric(found / (layers * micro_batches))}
