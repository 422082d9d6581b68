"""Write a line to RUN_DIR/hooks/actor-0.txt when a backend's hook is called and when it returns, with the shapes of its
inputs and outputs. The numbers in arrays and tensors are never read: that would wait for the GPU."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Generator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import IO, Any

import attrs

from corerl.messages import one_line
from corerl.plugin import BACKEND_HOOKS, NoOptions

HOOKS_DIR = "hooks"


class HookTrace:
    """Wraps every hook of a backend. List it last to see what the backend itself is called with and returns, first to
    see what the other extensions make of it."""

    def __init__(self, *, options: NoOptions, run_dir: str) -> None:
        self._directory = Path(run_dir) / HOOKS_DIR
        self._file: IO[str] | None = None
        self._open = 0  # calls that have not returned yet

    def shutdown(self, reason: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _traced(self, hook: str, **arguments: Any) -> Generator[None, Any, Any]:
        if self._file is None:
            context = arguments["context"]  # of the first call, which is `init`
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = (self._directory / f"{context.role}-{context.rank}.txt").open("a", encoding="utf-8")
        shown = " ".join(f"{name}={summary(value)}" for name, value in arguments.items())
        self._write(f"> {hook} {shown}")
        started, self._open = time.perf_counter(), self._open + 1
        outcome = ""
        try:
            result = yield
            outcome = summary(result)
            return result
        except BaseException as error:
            outcome = f"raised {one_line(error)}"
            raise
        finally:
            self._open -= 1
            self._write(f"< {hook} {1000 * (time.perf_counter() - started):.1f} ms {outcome}")

    def _write(self, text: str) -> None:
        if self._file is not None:
            now = datetime.now().strftime("%H:%M:%S.%f")[:-3]
            self._file.write(f"{now} {'  ' * self._open}{text}\n")
            self._file.flush()


def _wrapper(hook: str) -> Callable[..., Generator[None, Any, Any]]:
    def wrapper(self: HookTrace, **arguments: Any) -> Generator[None, Any, Any]:
        return (yield from self._traced(hook, **arguments))

    return wrapper


for _hook in BACKEND_HOOKS:
    setattr(HookTrace, _hook, _wrapper(_hook))


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
