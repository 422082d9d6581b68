"""Find what a setting names as `module:function`."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from corerl.errors import ConfigError


def imported(name: str, *, setting: str) -> Callable[..., Any]:
    """The function of that name. Raises ConfigError, beginning with `setting`, where there is none."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{setting}: got {name!r}, wanted 'module:function'")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"{setting}: {name!r}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value)]
        near = get_close_matches(attribute, functions, n=1)
        raise ConfigError(
            f"{setting}: {name!r}: module {module_name!r} has no function {attribute!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return function
