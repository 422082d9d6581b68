"""A training backend for CoreRL: the whole model on every rank, gradients summed over ranks."""

from corerl_mine.spec import SPEC

__all__ = ["SPEC"]
