"""CORERL_TRACE=1: print a line to standard error when a hook is called and when it returns, with the shapes of its
inputs and outputs. The numbers in arrays and tensors are never read: that would wait for the GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from typing import Any

import attrs
import pluggy

from corerl.messages import one_line

VARIABLE = "CORERL_TRACE"
DEPTH = 4  # levels of nested objects that are shown
ITEMS = 12  # items of a mapping or a sequence that are shown
LONGEST = 60  # characters of a string that are shown


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
        told = " ".join(f"{name}={summary(value)}" for name, value in arguments.items())
        self._tell(f"> {hook} [{' > '.join(chain)}] {told}")
        self._started.append(time.perf_counter())

    def _ended(self, hook: str, error: BaseException | None, result: Any) -> None:
        taken = 1000 * (time.perf_counter() - self._started.pop())
        told = f"raised {one_line(error)}" if error is not None else summary(result)
        self._tell(f"< {hook} {taken:.1f} ms {told}")

    def _tell(self, text: str) -> None:
        now = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        print(f"{now} {self._where} {'  ' * len(self._started)}{text}", file=sys.stderr, flush=True)


def summary(value: Any, depth: int = DEPTH) -> str:
    """`value` on one line: arrays and tensors by dtype and shape, numbers and short strings as they are."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= LONGEST else value[:LONGEST] + "...")
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # numpy or torch, without importing either
        device = getattr(value, "device", None)
        on = f" on {device}" if device is not None and str(device) != "cpu" else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{on}"
    if depth == 0:
        counted = f"{len(value)}" if isinstance(value, Mapping | list | tuple | Set) else "..."
        return f"{type(value).__name__}({counted})"
    if isinstance(value, Mapping):
        items = [f"{summary(key)}: {summary(each, depth - 1)}" for key, each in list(value.items())[:ITEMS]]
        return "{" + ", ".join(items + _more(value)) + "}"
    if isinstance(value, list | tuple):
        alike = len(value) > 1 and len({type(each) for each in value}) == 1 and attrs.has(type(value[0]))
        items = [summary(value[0], depth - 1)] if alike else [summary(each, depth - 1) for each in value[:ITEMS]]
        return f"[{len(value)} x {items[0]}]" if alike else "[" + ", ".join(items + _more(value)) + "]"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(summary(each, depth - 1) for each in value)) + "}"
    if attrs.has(type(value)):
        fields = [
            f"{field.name.lstrip('_')}={summary(getattr(value, field.name), depth - 1)}"
            for field in attrs.fields(type(value))
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    return f"<{type(value).__name__}>"  # lazy iterables are not consumed


def _more(value: Any) -> list[str]:
    return [f"and {len(value) - ITEMS} more"] if len(value) > ITEMS else []
