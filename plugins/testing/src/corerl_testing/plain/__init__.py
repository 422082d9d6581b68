"""The plain backend: one process, plain torch, written to be read. Other backends are compared with it, and it asserts
that its caller keeps the contract."""

from corerl_testing.plain.spec import SPEC

__all__ = ["SPEC"]
