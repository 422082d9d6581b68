"""CORERL_TRACE=1: print a line to standard error when a hook is called and when it returns, with the shapes of its
inputs and outputs. The numbers in arrays and tensors are never read: that would wait for the GPU."""

from __future__ import annotations

import os
import reprlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any

import attrs

from corerl.messages import one_line

VARIABLE = "CORERL_TRACE"


def wanted() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


class HookTrace:
    """Traces the hook calls of one process, if the user asks for it. `where` is its name, such as `actor rank 0`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._on = wanted()
        self._open = 0  # calls that have not returned yet

    def call(self, hook: str, chain: Sequence[str], arguments: Mapping[str, Any], function: Callable[[], Any]) -> Any:
        """What `function` returns: a call of the plugins in `chain`, the first outermost."""
        if not self._on:
            return function()
        shown = " ".join(f"{name}={summary(value)}" for name, value in arguments.items())
        self._print(f"> {hook} [{' > '.join(chain)}] {shown}")
        started, self._open = time.perf_counter(), self._open + 1
        outcome = ""
        try:
            result = function()
            outcome = summary(result)
            return result
        except BaseException as error:
            outcome = f"raised {one_line(error)}"
            raise
        finally:
            self._open -= 1
            self._print(f"< {hook} {1000 * (time.perf_counter() - started):.1f} ms {outcome}")

    def _print(self, text: str) -> None:
        now = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        print(f"{now} {self._where} {'  ' * self._open}{text}", file=sys.stderr, flush=True)


class _Summary(reprlib.Repr):
    """Arrays and tensors by dtype and shape, objects by their fields, all else shortened."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring = 4, 60
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 12

    def repr1(self, x: Any, level: int) -> str:
        if hasattr(x, "shape") and hasattr(x, "dtype"):  # numpy or torch, without importing either
            device = str(getattr(x, "device", "cpu"))
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{f' on {device}' if device != 'cpu' else ''}"
        if attrs.has(type(x)):
            fields = [each.name for each in attrs.fields(type(x))] if level > 0 else []
            shown = [f"{name.lstrip('_')}={self.repr1(getattr(x, name), level - 1)}" for name in fields]
            return f"{type(x).__name__}({', '.join(shown) if level > 0 else '...'})"
        return str(x.value) if isinstance(x, Enum) else super().repr1(x, level)


summary = _Summary().repr
