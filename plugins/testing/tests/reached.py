"""The plain backend, telling which of the methods that broken backends override are reached, and where a fault that
waits for something would have met it: a check in which none of that happens runs the plain backend's code, whatever the
broken backend's name."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from corerl.backend import StateKey
from corerl.backend.routing import COLUMN
from corerl.plugin.registry import Kind, load, load_implementation
from corerl.types import Output
from corerl_testing.broken import BROKEN
from corerl_testing.broken.backends import LeaksBetweenLongSequences
from corerl_testing.plain.backend import PlainBackend
from corerl_testing.plain.spec import SPEC as PLAIN

FILE = "CORERL_TEST_REACHED"  # names it; each call of a method in any process adds a line


@frozen
class Call:
    """Of a method of the plain backend, which has ended."""

    backend: PlainBackend
    given: Mapping[str, Any]  # its arguments by name
    result: Any  # None if it raised
    error: BaseException | None

    @property
    def optimizer(self) -> Any:
        return self.backend.config.train.optimizer


# Class of a broken backend -> its one method, and in which calls that does more than call the plain backend's.
WAITS_FOR: dict[str, tuple[str, Callable[[Call], Any]]] = {
    "SwallowsErrors": ("forward_backward", lambda call: call.error),
    "CountsSkippedSteps": ("optimizer_step", lambda call: call.result and not call.result.applied),
    "KeepsFirstRate": ("optimizer_step", lambda call: call.given["step"].lr != call.optimizer.lr),
    "OwnExperts": ("forward_backward", lambda call: any(COLUMN in each.columns for each in micro_batches(call))),
    "IgnoresAuxLoss": ("forward_backward", lambda call: call.backend.config.train.aux_loss_coef),
    "AlwaysScales": (
        "optimizer_step",
        lambda call: call.result and not call.result.grad_norm > (call.optimizer.clip_norm or 0),
    ),
    "ForgetsEarlierCalls": ("forward_backward", lambda call: not call.given["last"]),
    "StepsInEveryCall": ("forward_backward", lambda call: not call.given["last"]),
    "IgnoresScale": ("optimizer_step", lambda call: call.given["scale"] != 1.0),
    "ClearsTooEarly": ("forward", lambda call: any(param.grad is not None for param in call.backend.params.values())),
    "ReturnsOutputsOfOneMicroBatch": ("forward_backward", lambda call: call.given["outputs"]),
    "LeaksBetweenLongSequences": ("outputs", lambda call: is_long(call)),
    "LeaksInTraining": (
        "outputs",
        lambda call: call.backend.model.training and is_long(call),
    ),
    "OffByOneLogprobs": ("of_sequences", lambda call: call.result and Output.LOGPROBS in call.result),
    "LosesWeightsInSwap": ("using", lambda call: call.given["weights"]),
    "KeepsSnapshot": ("using", lambda call: call.given["weights"]),
    "ForgetsOptimizer": ("after_load", lambda call: StateKey.EXP_AVG in call.given["keys"]),
    "StagesTooLate": ("save", lambda call: call.given["background"]),
    "SkipsTiedParameter": ("init", lambda call: call.error or call.backend.model.config.tie_word_embeddings),
}


def is_long(call: Call) -> bool:
    """Whether a sequence is longer than the ones that those who leak keep apart."""
    return bool((call.given["micro"].lengths[1:] > LeaksBetweenLongSequences.ALONE).any())


def micro_batches(call: Call) -> Any:
    return () if call.error else call.given["batch"].micro_batches


def overridden(name: str) -> frozenset[str]:
    """The plain backend's methods that this broken backend has of its own, with its class where they wait for
    something; none where its fault is in its spec."""
    implementation = load_implementation(Kind.BACKENDS, load(Kind.BACKENDS, name))
    if not issubclass(implementation, PlainBackend):
        raise TypeError(f"{name} is {implementation}, expected a subclass of PlainBackend")
    if implementation is load_implementation(Kind.BACKENDS, load(Kind.BACKENDS, "plain")):
        return frozenset()
    own = implementation.__mro__[: implementation.__mro__.index(PlainBackend)]
    names = {each for cls in own for each in vars(cls)} - {"_abc_impl"}  # which Python makes for each class
    methods = frozenset(each for each in names if not each.startswith("__") and hasattr(PlainBackend, each))
    if implementation.__name__ not in WAITS_FOR:
        return methods
    method, _ = WAITS_FOR[implementation.__name__]
    if methods != {method}:
        raise TypeError(f"{name} overrides {sorted(methods)}, expected {method} alone, of which its line here tells")
    return frozenset({f"{method}:{implementation.__name__}"})


def told(name: str) -> Callable[..., Any]:
    method = getattr(PlainBackend, name)
    if not callable(method):
        raise TypeError(f"PlainBackend.{name} is {method!r}, expected a method, whose calls can be told")

    signature = inspect.signature(method)
    waiting = {cls: met for cls, (waits_in, met) in WAITS_FOR.items() if waits_in == name}

    @functools.wraps(method)
    def telling(self: PlainBackend, *args: Any, **named: Any) -> Any:
        tell(name)
        result, error = None, None
        try:
            result = method(self, *args, **named)
            return result
        except BaseException as raised:
            error = raised
            raise
        finally:
            call = Call(self, signature.bind(self, *args, **named).arguments, result, error)
            for cls, met in waiting.items():
                if met(call):
                    tell(f"{name}:{cls}")

    return telling


def tell(line: str) -> None:
    with open(os.environ[FILE], "a") as file:  # in a process that may be killed
        file.write(f"{line}\n")


class Telling(PlainBackend):
    """The plain backend, which tells what is reached of it."""


for _name in sorted({each.partition(":")[0] for backend in BROKEN for each in overridden(backend)}):
    setattr(Telling, _name, told(_name))

SPEC = evolve(PLAIN, implementation=f"{__name__}:Telling", summary="the plain backend, telling what is reached of it")
NAME = f"{__name__}:SPEC"


def take() -> frozenset[str]:
    """What was reached since the last call."""
    file = Path(os.environ[FILE])
    found = frozenset(file.read_text().split()) if file.exists() else frozenset()
    file.write_text("")
    return found
