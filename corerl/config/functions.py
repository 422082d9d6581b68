"""Import the function that a setting names as `module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from corerl.errors import ConfigError
from corerl.messages import did_you_mean, one_line


def imported(name: str, *, setting: str) -> Callable[..., Any]:
    """The function that `name` refers to. If there is none, raises ConfigError with a message that begins with
    `setting`."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{setting}: got {name!r}, wanted 'module:function'")
    try:
        module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing a user's module may raise anything
        raise ConfigError(f"{setting}: {name!r}: cannot import {module_name!r}: {one_line(error)}") from error
    try:
        function = getattr(module, attribute, None)
    except Exception as error:  # of the module's own `__getattr__`
        raise ConfigError(f"{setting}: {name!r}: module {module_name!r} raised {one_line(error)}") from error
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{setting}: {name!r}: module {module_name!r} has no function {attribute!r}"
            + did_you_mean(attribute, functions)
        )
    return function


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """How a user's function is called; None where Python cannot tell, as of some that are written in C."""
    try:
        return inspect.signature(function)
    except Exception:  # ValueError, or whatever its own `__signature__` raises
        return None
