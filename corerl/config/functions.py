"""Import the function that a setting names as `module:function`."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from corerl.errors import ConfigError
from corerl.messages import did_you_mean, one_line


def imported(name: str, *, setting: str) -> Callable[..., Any]:
    """The function that `name` refers to. If there is none, raises ConfigError with a message that begins with
    `setting`."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{setting}: got {name!r}, wanted 'module:function'")
    heard: list[int] = []
    try:
        with _interrupts(heard):
            module = import_module(module_name)
    except BaseException as error:  # importing a user's module may raise anything
        if isinstance(error, KeyboardInterrupt) and heard:
            raise
        hidden = _hidden(module_name) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{setting}: {name!r}: cannot import {module_name!r}: {one_line(error)}{hidden}") from error
    try:
        function = getattr(module, attribute, None)
    except Exception as error:  # of the module's own `__getattr__`
        raise ConfigError(f"{setting}: {name!r}: module {module_name!r} raised {one_line(error)}") from error
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{setting}: {name!r}: module {module_name!r} has no function {attribute!r}"
            + (_hidden(module_name) or did_you_mean(attribute, functions))
        )
    return function


@contextmanager
def _interrupts(heard: list[int]) -> Iterator[None]:
    """Append to `heard` each signal that interrupts the block, as the user's Ctrl-C does: code may raise
    KeyboardInterrupt by itself. Signals interrupt the main thread only."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hear:
            signal.signal(signal.SIGINT, before)


def _hidden(module_name: str) -> str:
    """That the working directory has a module of this name too, which was not looked for; "" otherwise."""
    name = module_name.partition(".")[0]
    found = getattr(sys.modules.get(name), "__file__", None)
    own = next((path for path in (f"{name}.py", name) if os.path.exists(path)), "")
    if not found or not own or Path(found).resolve().is_relative_to(Path.cwd()):
        return ""
    return f"; it is {found}, since installed modules come before those of the working directory: rename your {own}"


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """How a user's function is called; None where Python cannot tell, as of some that are written in C."""
    try:
        return inspect.signature(function)
    except Exception:  # ValueError, or whatever its own `__signature__` raises
        return None
