"""Each way to break the contract of hooks is found when plugins are registered, in words that its author can use."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import wraps
from types import FunctionType
from typing import Any

import pluggy
import pytest

from corerl import hookimpl
from corerl.errors import ContractError
from corerl.plugin.contract import build_manager, call_each, check_backend


class Backend:
    """All required hooks, each an ordinary method."""

    @hookimpl
    def init(self, config: Any, context: Any) -> str:
        return "init"

    @hookimpl
    def forward_backward(self, batch: Any, loss: Any, outputs: Any, last: Any) -> str:
        return "forward_backward"

    @hookimpl
    def optimizer_step(self, step: Any, scale: Any) -> str:
        return "optimizer_step"

    @hookimpl
    def forward(self, batch: Any, outputs: Any, weights: Any) -> str:
        return "forward"

    @hookimpl
    def update_weights(self, sender: Any, version: Any) -> str:
        return "update_weights"

    @hookimpl
    def save(self, path: Any, step: Any, background: Any) -> str:
        return "save"

    @hookimpl
    def sleep(self, kinds: Any) -> str:
        return "sleep"

    @hookimpl
    def wake_up(self, kinds: Any) -> str:
        return "wake_up"


def registered(*extensions: tuple[str, object], backend: object = None) -> pluggy.PluginManager:
    manager = build_manager([("backend:mine", backend or Backend()), *extensions])
    check_backend(manager, "backend:mine")
    return manager


def test_a_backend_with_every_required_hook_is_accepted() -> None:
    assert registered().hook.optimizer_step(step=1, scale=2) == "optimizer_step"


def test_a_wrapper_may_take_fewer_or_newer_arguments() -> None:
    class Newer:
        @hookimpl(wrapper=True)
        def optimizer_step(self, step: int, future: int = 7) -> Generator[None, str, Any]:
            result = yield
            return (result, step, future)

    found = registered(("extension:t", Newer())).hook.optimizer_step(step=3, scale=2)
    assert found == ("optimizer_step", 3, 7)


def extension(**hooks: Any) -> object:
    """An instance of a class with these methods."""
    return type("Extension", (), hooks)()


def yields(self: Any) -> Iterator[None]:
    return (yield)


def returns(self: Any) -> None: ...


async def awaits(self: Any, event: Any) -> None: ...


def keyword_only(self: Any, batch: Any, *, loss: Any) -> Iterator[None]:
    return (yield)


def positional_only(self: Any, batch: Any, /) -> Iterator[None]:
    return (yield)


def star(self: Any, **everything: Any) -> Iterator[None]:
    return (yield)


def unknown(self: Any, batch: Any, index: Any) -> Iterator[None]:
    return (yield)


def logged(function: Any) -> Any:
    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def marked(function: Any, **options: Any) -> Any:
    """A copy, marked as a hook."""
    code = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    code.__dict__.update(function.__dict__)
    return hookimpl(**options)(code)


def wrapper(function: Any, **options: Any) -> Any:
    return marked(function, wrapper=True, **options)


STEP = "extension:t implements optimizer_step() for optimizer_step(step, scale): "
BACKWARD = "extension:t implements forward_backward{} for forward_backward(batch, loss, outputs, last): {}"
ORDER = "tryfirst and trylast override the order of the config's list; remove them"


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Backend, "extension:t is the class Backend, expected an instance; instantiate it first"),
        (
            extension(observe=returns),
            "extension:t implements no hook; mark its methods with @hookimpl (from corerl import hookimpl)",
        ),
        (
            extension(optimizer_stpe=wrapper(yields)),
            "extension:t implements unknown hook 'optimizer_stpe'; did you mean 'optimizer_step'?",
        ),
        (
            extension(wakeup=wrapper(yields, optionalhook=True)),
            "extension:t implements unknown hook 'wakeup'; did you mean 'wake_up'?",
        ),
        (
            extension(around=wrapper(yields, specname="optimiser_step")),
            "extension:t implements unknown hook 'optimiser_step'; did you mean 'optimizer_step'?",
        ),
        (
            extension(forward_backward=wrapper(keyword_only)),
            BACKWARD.format(
                "(batch, *, loss)", "keyword-only parameter 'loss' is never passed; move it before the '*'"
            ),
        ),
        (
            extension(forward_backward=wrapper(logged(keyword_only))),  # a decorator hides nothing
            BACKWARD.format(
                "(self, batch, *, loss)", "keyword-only parameter 'loss' is never passed; move it before the '*'"
            ),
        ),
        (
            extension(forward_backward=wrapper(positional_only)),
            BACKWARD.format("(batch, /)", "parameter 'batch' is positional-only; remove the '/'"),
        ),
        (
            extension(forward_backward=wrapper(star)),
            BACKWARD.format(
                "(**everything)", "star parameter 'everything' receives nothing; name the arguments you need"
            ),
        ),
        (
            extension(forward_backward=wrapper(unknown)),
            BACKWARD.format(
                "(batch, index)", "parameter 'index' does not exist in the hook; rename it or give it a default"
            ),
        ),
        (
            extension(observe=marked(awaits)),
            (
                "extension:t implements observe(event) for observe(event): it is async, but hooks are never awaited; "
                "make it an ordinary function"
            ),
        ),
        (
            extension(optimizer_step=marked(yields, hookwrapper=True)),
            STEP + "hookwrapper=True hides the backend's own error; write wrapper=True and 'return (yield)'",
        ),
        (
            extension(optimizer_step=wrapper(returns)),
            STEP + "a wrapper needs exactly one yield; write 'return (yield)'",
        ),
        (
            extension(optimizer_step=marked(yields)),
            STEP + "it yields but is not a wrapper; write @hookimpl(wrapper=True)",
        ),
        (extension(optimizer_step=wrapper(yields, tryfirst=True)), STEP + ORDER),
        (extension(optimizer_step=wrapper(yields, trylast=True)), STEP + ORDER),
        (
            extension(shutdown=wrapper(yields)),
            (
                "extension:t implements shutdown() for shutdown(reason): shutdown is called on each plugin separately "
                "and cannot be wrapped; implement it without wrapper=True"
            ),
        ),
        (
            extension(optimizer_step=marked(returns)),
            (
                "extension:t implements optimizer_step itself, which only backend:mine may do; to wrap it, use "
                "@hookimpl(wrapper=True) and end with 'return (yield)'"
            ),
        ),
    ],
)
def test_each_breach_of_the_contract_is_named(plugin: object, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        registered(("extension:t", plugin))
    assert caught.value.message == message


def test_only_optional_hooks_may_be_unknown() -> None:
    newer = extension(quench=marked(returns, optionalhook=True), observe=hookimpl(lambda self, event: None))
    registered(("extension:t", newer))
    with pytest.raises(ContractError, match="^extension:t implements unknown hook 'quench'; known hooks: init, "):
        registered(("extension:t", extension(quench=marked(returns))))


def test_a_backend_must_implement_each_required_hook_exactly_once() -> None:
    class Forgets(Backend):
        def save(self, path: Any, step: Any, background: Any) -> str:  # overriding loses the mark
            return "save"

    class Twice(Backend):
        @hookimpl(specname="optimizer_step")
        def step_too(self, step: Any) -> str:
            return "optimizer_step"

    for backend, found in (
        (Forgets(), "save not at all, expected exactly one method without wrapper=True: save(path, step, background)"),
        (
            Twice(),
            "optimizer_step 2 times, expected exactly one method without wrapper=True: optimizer_step(step, scale)",
        ),
    ):
        with pytest.raises(ContractError) as caught:
            registered(backend=backend)
        assert caught.value.message == f"backend:mine implements {found}"


def test_backends_do_not_observe_and_names_are_unique() -> None:
    class Curious(Backend):
        @hookimpl
        def observe(self, event: Any) -> None: ...

    with pytest.raises(ContractError, match="backend:mine implements observe, which only extensions may do"):
        registered(backend=Curious())
    watches = extension(observe=hookimpl(lambda self, event: None))
    with pytest.raises(ContractError, match="extension:t is listed twice; list each extension once"):
        registered(("extension:t", watches), ("extension:t", watches))


def test_calling_each_reaches_all_and_yields_what_they_raised() -> None:
    heard = []

    class Watches:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self.name, self.error = name, error

        @hookimpl
        def observe(self, event: Any, future: str = "own default") -> None:
            heard.append((self.name, event, future))
            if self.error:
                raise self.error

    boom = ValueError("boom")
    manager = registered(("extension:in", Watches("in")), ("extension:out", Watches("out", boom)))
    assert list(call_each(manager, "observe", event=1)) == [("extension:out", boom)]
    assert heard == [("out", 1, "own default"), ("in", 1, "own default")]
    assert list(call_each(manager, "observe", skip={"extension:out"}, event=2)) == []
    assert heard[2:] == [("in", 2, "own default")]
