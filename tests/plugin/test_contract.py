"""Each breach of the contract of hooks is found when plugins are registered, in words that its author can use."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import wraps
from typing import Any

import pytest

from corerl.errors import ContractError
from corerl.plugin.contract import WORKER_HOOKS, Extensions, Method, backend_methods


def extension(**hooks: Any) -> object:
    """An instance of a class with these methods."""
    return type("Extension", (), hooks)()


def yields(self: Any) -> Iterator[None]:
    return (yield)


def returns(self: Any) -> None: ...


def unknown(self: Any, batch: Any, index: Any) -> Iterator[None]:
    return (yield)


def starred(self: Any, *index: Any) -> Iterator[None]:
    return (yield)


def logged(function: Any) -> Any:
    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


BACKWARD = (
    "extension:t implements forward_backward(batch, index) for forward_backward(batch, loss, outputs, last): parameter "
    "'index' is not passed by name; rename it or give it a default"
)
STARRED = (
    "extension:t implements forward_backward(*index) for forward_backward(batch, loss, outputs, last): arguments are "
    "passed by name, so *index gets none; name those that it needs"
)
STEP_ITSELF = (
    "extension:t implements optimizer_step itself, which only a backend may do; to wrap it, end with 'return (yield)'"
)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Method, "extension:t is the class Method, expected an instance; instantiate it first"),
        (extension(helps=returns), "extension:t implements no hook; known hooks: init, forward_backward, "),
        (
            extension(shutdown=returns, optimizer_stpe=yields),
            "extension:t has 'optimizer_stpe'; did you mean the hook 'optimizer_step'? Else rename it",
        ),
        (extension(wakeup=yields), "extension:t has 'wakeup'; did you mean the hook 'wake_up'? Else rename it"),
        (extension(forward_backward=unknown), BACKWARD),
        (extension(forward_backward=logged(unknown)), BACKWARD),  # a decorator hides nothing
        (extension(forward_backward=starred), STARRED),
        (extension(optimizer_step=returns), STEP_ITSELF),
        (
            extension(observe=lambda self, event: None),
            (
                "extension:t implements observe, but it is called on the driver only; remove it, or move it to an "
                "extension whose spec has process=Process.DRIVER"
            ),
        ),
    ],
)
def test_each_breach_of_the_contract_is_named(plugin: object, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        Extensions([("t", plugin)], hooks=WORKER_HOOKS)
    assert caught.value.message.startswith(message)


def test_an_extension_is_listed_once() -> None:
    watches = extension(shutdown=returns)
    with pytest.raises(ContractError, match="extension:t is listed twice; list each extension once"):
        Extensions([("t", watches), ("t", watches)], hooks=WORKER_HOOKS)


def test_a_backend_has_each_hook_and_none_of_the_drivers() -> None:
    hooks = dict.fromkeys(set(WORKER_HOOKS) - {"shutdown"}, returns)
    assert set(backend_methods("backend:mine", extension(**hooks))) == hooks.keys()
    with pytest.raises(ContractError, match="backend:mine implements observe, but it is called on the driver only"):
        backend_methods("backend:mine", extension(**hooks, observe=returns))
    hooks.pop("save")
    with pytest.raises(ContractError, match=r"^backend:mine does not implement save\(path, step, background\)$"):
        backend_methods("backend:mine", extension(**hooks))


# ---- calls -----------------------------------------------------------------------------------------------------------


def wrapped(*plugins: object, step: Callable[..., Any] = lambda step, scale: (step, scale)) -> Any:
    extensions = Extensions([(f"e{number}", each) for number, each in enumerate(plugins)], hooks=WORKER_HOOKS)
    innermost = Method("backend:mine", "optimizer_step", step, ("step", "scale"))
    return extensions.wrapped(innermost, {"step": 3, "scale": 2})


def test_a_wrapper_may_take_fewer_or_newer_arguments() -> None:
    class Newer:
        def optimizer_step(self, step: int, future: int = 7) -> Generator[None, Any, Any]:
            result = yield
            return (result, step, future)

    class All:
        def optimizer_step(self, **arguments: Any) -> Generator[None, Any, Any]:
            return ((yield), arguments)

    assert wrapped(Newer(), All()) == (((3, 2), {"step": 3, "scale": 2}), 3, 7)


def test_wrappers_see_the_error_of_what_they_wrap() -> None:
    log = []

    class Sees:
        def __init__(self, replaces: bool) -> None:
            self.replaces = replaces

        def optimizer_step(self) -> Generator[None, Any, Any]:
            try:
                return (yield)
            except ValueError as error:
                log.append(str(error))
                if self.replaces:
                    raise ValueError("other") from error
                raise

    def fails(**_: Any) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="other") as caught:
        wrapped(Sees(False), Sees(True), step=fails)
    assert log == ["boom", "other"] and str(caught.value.__cause__) == "boom"


def test_a_wrapper_yields_once() -> None:
    class Twice:
        def optimizer_step(self) -> Iterator[None]:
            yield
            yield

    with pytest.raises(ContractError, match="^extension:e0: optimizer_step yields twice; yield once, and return"):
        wrapped(Twice())
