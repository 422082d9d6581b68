"""The base class that every training backend extends."""

from corerl.backend.base import Backend, StateKey

__all__ = ["Backend", "StateKey"]
