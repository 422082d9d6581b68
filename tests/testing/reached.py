"""The plain backend, telling which of the methods that broken backends override are reached: a check in which none of
a broken backend's is reached runs the plain backend's code, whatever that backend's name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve

from corerl.plugin.registry import Kind, load, load_implementation
from corerl.testing.broken import BROKEN
from corerl.testing.plain.backend import PlainBackend
from corerl.testing.plain.spec import SPEC as PLAIN

FILE = "CORERL_TEST_REACHED"  # names it; each call of a method in any process adds a line


def overridden(name: str) -> frozenset[str]:
    """The plain backend's methods that this broken backend has of its own; none where its fault is in its spec."""
    implementation = load_implementation(Kind.BACKENDS, load(Kind.BACKENDS, name))
    if not issubclass(implementation, PlainBackend):
        raise TypeError(f"{name} is {implementation}, expected a subclass of PlainBackend")
    if implementation is load_implementation(Kind.BACKENDS, load(Kind.BACKENDS, "plain")):
        return frozenset()
    own = implementation.__mro__[: implementation.__mro__.index(PlainBackend)]
    names = {each for cls in own for each in vars(cls)} - {"_abc_impl"}  # which Python makes for each class
    return frozenset(each for each in names if not each.startswith("__") and hasattr(PlainBackend, each))


def told(name: str) -> Callable[..., Any]:
    method = getattr(PlainBackend, name)
    if not callable(method):
        raise TypeError(f"PlainBackend.{name} is {method!r}, expected a method, whose calls can be told")

    @functools.wraps(method)
    def telling(self: PlainBackend, *args: Any, **named: Any) -> Any:
        with open(os.environ[FILE], "a") as file:  # in a process that may be killed
            file.write(f"{name}\n")
        return method(self, *args, **named)

    return telling


class Telling(PlainBackend):
    """The plain backend, which tells what is reached of it."""


for _name in sorted({each for backend in BROKEN for each in overridden(backend)}):
    setattr(Telling, _name, told(_name))

SPEC = evolve(PLAIN, implementation=f"{__name__}:Telling", summary="the plain backend, telling what is reached of it")
NAME = f"{__name__}:SPEC"


def take() -> frozenset[str]:
    """What was reached since the last call."""
    file = Path(os.environ[FILE])
    found = frozenset(file.read_text().split())
    file.write_text("")
    return found
