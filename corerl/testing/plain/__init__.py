"""The plain backend: one process, plain torch, written to be read; what other backends are compared with, and what
asserts that its caller keeps the contract too."""

from corerl.testing.plain.spec import SPEC

__all__ = ["SPEC"]
