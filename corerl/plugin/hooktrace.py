"""CORERL_TRACE=1: print a line to standard error when a hook is called and when it returns, with the shapes of its
inputs and outputs. The numbers in arrays and tensors are never read: that would wait for the GPU."""

from __future__ import annotations

import os
import reprlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from typing import Any

import attrs
import pluggy

from corerl.messages import one_line

VARIABLE = "CORERL_TRACE"


def wanted() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


class HookTrace:
    """Traces the hook calls of one process. `where` is its name, such as `actor rank 0`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._started: list[float] = []  # start times of the open calls, outermost first

    def follow(self, manager: pluggy.PluginManager) -> None:
        """Trace each call that goes through `manager`."""

        def after(outcome: pluggy.Result[Any], hook: str, implementations: Sequence[Any], arguments: Any) -> None:
            self._ended(hook, outcome.exception, None if outcome.exception else outcome.get_result())

        manager.add_hookcall_monitoring(
            lambda hook, implementations, arguments: self._began(
                hook, [each.plugin_name for each in reversed(implementations)], arguments
            ),
            after,
        )

    @contextmanager
    def call(self, hook: str, plugin: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Trace a call of one plugin that does not go through the manager."""
        self._began(hook, [plugin], arguments)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._ended(hook, error, None)

    def _began(self, hook: str, chain: Sequence[str], arguments: Mapping[str, Any]) -> None:
        shown = " ".join(f"{name}={summary(value)}" for name, value in arguments.items())
        self._print(f"> {hook} [{' > '.join(chain)}] {shown}")
        self._started.append(time.perf_counter())

    def _ended(self, hook: str, error: BaseException | None, result: Any) -> None:
        taken = 1000 * (time.perf_counter() - self._started.pop())
        outcome = f"raised {one_line(error)}" if error is not None else summary(result)
        self._print(f"< {hook} {taken:.1f} ms {outcome}")

    def _print(self, text: str) -> None:
        now = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        print(f"{now} {self._where} {'  ' * len(self._started)}{text}", file=sys.stderr, flush=True)


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
