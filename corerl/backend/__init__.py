"""The base class that every training backend extends, and what its step needs to compute a loss."""

from corerl.algorithms.losses import LossInputs
from corerl.algorithms.metrics import MetricSum
from corerl.algorithms.registry import resolve_loss
from corerl.backend.base import Backend, StateKey

__all__ = ["Backend", "LossInputs", "MetricSum", "StateKey", "resolve_loss"]
