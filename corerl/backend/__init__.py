"""The base class that every training backend extends, and what its step needs to compute a loss."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.algorithms.losses import LossInputs as LossInputs
    from corerl.algorithms.metrics import MetricSum as MetricSum
    from corerl.algorithms.registry import resolve_loss as resolve_loss
    from corerl.backend.base import Backend as Backend
    from corerl.backend.batches import DeviceBatch as DeviceBatch
    from corerl.backend.batches import OutputCollector as OutputCollector
    from corerl.backend.batches import counted as counted
    from corerl.backend.batches import to_device as to_device
    from corerl.backend.experts import AUX_LOSS as AUX_LOSS
    from corerl.backend.experts import free_tokens as free_tokens
    from corerl.backend.experts import metrics_of_load as metrics_of_load
    from corerl.backend.experts import replayed_experts as replayed_experts
    from corerl.backend.experts import require_balance as require_balance
    from corerl.backend.optimizer import adamw as adamw
    from corerl.backend.optimizer import moments as moments
    from corerl.backend.optimizer import set_adam as set_adam
    from corerl.backend.optimizer import set_adam_step as set_adam_step
    from corerl.backend.optimizer import set_lr as set_lr
    from corerl.backend.optimizer import step_scaled as step_scaled
    from corerl.backend.passes import StepLosses as StepLosses
    from corerl.backend.passes import forward_outputs as forward_outputs
    from corerl.backend.primitives import ExtraState as ExtraState
    from corerl.backend.primitives import StateKey as StateKey
    from corerl.plugin.host import PluginHost as PluginHost
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
