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

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def imported(name: str, *, setting: str) -> Callable[..., Any]:
    """The function that `name` refers to. If there is none, raises ConfigError with a message that begins with
    `setting`."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{setting}: got {name!r}, wanted 'module:function'")
    heard: list[BaseException] = []
    try:
        with interrupts(heard):
            module = import_module(module_name)
    except BaseException as error:  # importing a user's module may raise anything
        if heard:
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
def interrupts(heard: list[BaseException]) -> Iterator[None]:
    """Append to `heard` what the handlers of SIGINT and SIGTERM raise in the block, as for the user's Ctrl-C, and raise
    it even if the block's code hides it: code may raise KeyboardInterrupt by itself. Signals interrupt the main thread
    only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[[int, FrameType | None], Any]] = {
        number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))
    }

    def hear(number: int, frame: FrameType | None) -> None:
        try:
            before[number](number, frame)
        except BaseException as error:
            heard.append(error)
            raise

    for number in before:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is hear:  # not one that the block has set
                signal.signal(number, handler)
        if heard:
            raise heard[0]


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
