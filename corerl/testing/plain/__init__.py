"""The plain backend: one process, plain torch, written to be read; what other backends are compared with."""

from corerl.testing.plain.spec import SPEC

__all__ = ["SPEC"]
