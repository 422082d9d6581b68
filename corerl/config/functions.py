"""Import the function that a setting names as `module:function`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from corerl.errors import ConfigError
from corerl.messages import did_you_mean, listed, one_line

SHOWN = 5  # functions of a module that are listed if it lacks the one in question


def imported(name: str, *, setting: str) -> Callable[..., Any]:
    """The function that `name` refers to. Raises ConfigError for any other name, with a message that begins with
    `setting`."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ConfigError(f"{setting}: got {name!r}, wanted 'module:function'{suggestion(name)}")
    try:
        module = import_module(module_name)
        function = getattr(module, attribute, None)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        hint = suggestion(name) or (_missing(module_name, error) if isinstance(error, ModuleNotFoundError) else "")
        raise ConfigError(f"{setting}: {name!r}: cannot import {module_name!r}: {one_line(error)}{hint}") from error
    if not callable(function):
        functions = {each: value for each, value in vars(module).items() if callable(value) and each[0] != "_"}
        own = [each for each, value in functions.items() if inspect.isfunction(value)]
        hint = (
            _hidden(module_name) or did_you_mean(attribute, functions) or f"; it has {listed(own, SHOWN)}" * bool(own)
        )
        raise ConfigError(f"{setting}: {name!r}: module {module_name!r} has no function {attribute!r}{hint}")
    return function


def suggestion(name: str) -> str:
    """The end of a message about a setting that is no 'module:function' but the path of a file, or has only dots."""
    module, colon, function = name.partition(":")
    directory = ""
    if module.endswith(".py") or os.sep in module:
        path = os.path.relpath(module).removesuffix(".py")
        if path.startswith(os.pardir):
            directory, path = os.path.split(os.path.abspath(path))
        module = path.replace(os.sep, ".")
    elif not colon:
        module, _, function = name.rpartition(".")
    if not module or f"{module}:{function}" == name:
        return ""
    where = f", with PYTHONPATH={directory}" if directory else ""
    return f"; did you mean '{module}:{function or 'FUNCTION'}'{where}?"


def _missing(module_name: str, error: ModuleNotFoundError) -> str:
    """What to do about a module that is not found; "" if it is found, but imports another one that is not."""
    name = module_name.partition(".")[0]
    if error.name != name:
        return _hidden(module_name)
    here = [path.stem for path in Path().glob("*.py")]
    return did_you_mean(name, here) or f"; there is no {name}.py in {os.getcwd()}, and no such module is installed"


def _hidden(module_name: str) -> str:
    """That an installed module hides one of the same name in the working directory; "" otherwise."""
    name = module_name.partition(".")[0]
    own = next((path for path in (f"{name}.py", name) if os.path.exists(path)), "")
    module = sys.modules.get(name)
    found = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)  # of a namespace
    if not own or (found and Path(found).resolve().is_relative_to(Path.cwd())):
        return ""
    return f"; it is {found or 'built into Python'}: installed modules come first, rename your {own}"


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """How a user's function is called; None where Python cannot tell, as of some that are written in C."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def require_callable(
    function: Callable[..., Any], call: str, *arguments: object, setting: str, options: Mapping[str, Any]
) -> None:
    """Raise ConfigError if a user's function does not take these positional arguments and these options by name; `call`
    shows how it is called."""
    signature = signature_of(function)
    try:
        if signature is not None:
            signature.bind(*arguments, **options)
    except TypeError as error:
        given = f" with the options {', '.join(options)}" if options else ""
        raise ConfigError(f"{setting} takes {signature}, but is called as {call}{given}: {error}") from error
