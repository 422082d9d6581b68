"""Each way to break the contract of hooks is found when plugins are registered, in words that its author can use."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import wraps
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


def refusal(extension: object) -> str:
    with pytest.raises(ContractError) as caught:
        registered(("extension:t", extension))
    return caught.value.message


def test_a_backend_with_every_required_hook_is_accepted() -> None:
    assert registered().hook.optimizer_step(step=1, scale=2) == "optimizer_step"


def test_a_wrapper_that_takes_fewer_arguments_and_one_of_a_newer_core_is_accepted() -> None:
    class Newer:
        @hookimpl(wrapper=True)
        def optimizer_step(self, step: int, future: int = 7) -> Generator[None, str, Any]:
            result = yield
            return (result, step, future)

    found = registered(("extension:t", Newer())).hook.optimizer_step(step=3, scale=2)
    assert found == ("optimizer_step", 3, 7)


def test_a_class_is_no_plugin() -> None:
    assert refusal(Backend) == "extension:t is the class Backend, expected an instance; instantiate it first"


def test_an_extension_without_any_marked_method_is_refused() -> None:
    class Unmarked:
        def observe(self, event: Any) -> None: ...

    assert refusal(Unmarked()) == (
        "extension:t implements no hook; mark its methods with @hookimpl (from corerl import hookimpl)"
    )


def test_an_unknown_hook_is_answered_with_the_nearest_also_where_it_is_optional() -> None:
    class Typo:
        @hookimpl(wrapper=True)
        def optimizer_stpe(self) -> Iterator[None]:
            return (yield)

    class OptionalTypo:
        @hookimpl(wrapper=True, optionalhook=True)
        def wakeup(self) -> Iterator[None]:
            return (yield)

    class Strange:
        @hookimpl
        def quench(self) -> None: ...

    class OfANewerCore:
        @hookimpl(optionalhook=True)
        def quench(self) -> None: ...

        @hookimpl
        def observe(self, event: Any) -> None: ...

    assert refusal(Typo()) == "extension:t implements unknown hook 'optimizer_stpe'; did you mean 'optimizer_step'?"
    assert refusal(OptionalTypo()) == "extension:t implements unknown hook 'wakeup'; did you mean 'wake_up'?"
    assert refusal(Strange()) == (
        "extension:t implements unknown hook 'quench'; "
        "known hooks: init, forward_backward, optimizer_step, forward, update_weights, save, sleep, wake_up, shutdown, "
        "plan_ready, between_steps, ranks_failed, observe"
    )
    registered(("extension:t", OfANewerCore()))


def test_the_hook_that_specname_names_is_what_counts() -> None:
    class Renamed:
        @hookimpl(wrapper=True, specname="optimiser_step")
        def around(self) -> Iterator[None]:
            return (yield)

    assert refusal(Renamed()) == "extension:t implements unknown hook 'optimiser_step'; did you mean 'optimizer_step'?"


def test_parameters_that_pluggy_cannot_fill_are_refused() -> None:
    class KeywordOnly:
        @hookimpl(wrapper=True)
        def forward_backward(self, batch: Any, *, loss: Any) -> Iterator[None]:
            return (yield)

    class PositionalOnly:
        @hookimpl(wrapper=True)
        def forward_backward(self, batch: Any, /) -> Iterator[None]:
            return (yield)

    class Star:
        @hookimpl(wrapper=True)
        def forward_backward(self, **everything: Any) -> Iterator[None]:
            return (yield)

    class Unknown:
        @hookimpl(wrapper=True)
        def forward_backward(self, batch: Any, index: Any) -> Iterator[None]:
            return (yield)

    both = "extension:t implements forward_backward{} for forward_backward(batch, loss, outputs, last): {}"
    assert refusal(KeywordOnly()) == both.format(
        "(batch, *, loss)", "keyword-only parameter 'loss' is never passed; move it before the '*'"
    )
    assert refusal(PositionalOnly()) == both.format(
        "(batch, /)", "parameter 'batch' is positional-only; remove the '/'"
    )
    assert refusal(Star()) == both.format(
        "(**everything)", "star parameter 'everything' receives nothing; name the arguments you need"
    )
    assert refusal(Unknown()) == both.format(
        "(batch, index)", "parameter 'index' does not exist in the hook; rename it or give it a default"
    )


def test_a_decorator_does_not_hide_what_is_wrong_with_the_method_inside() -> None:
    def logged(function: Any) -> Any:
        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner

    class Decorated:
        @hookimpl(wrapper=True)
        @logged
        def optimizer_step(self, *, step: Any) -> Iterator[None]:
            return (yield)

    class Fine(Backend):
        @hookimpl
        @logged
        def optimizer_step(self, step: Any, scale: Any) -> str:
            return f"decorated {step}"

    assert "keyword-only parameter 'step'" in refusal(Decorated())
    assert registered(backend=Fine()).hook.optimizer_step(step=3, scale=2) == "decorated 3"


def test_async_old_style_and_misdeclared_wrappers_are_refused() -> None:
    class Async:
        @hookimpl
        async def observe(self, event: Any) -> None: ...

    class OldStyle:
        @hookimpl(hookwrapper=True)
        def optimizer_step(self) -> Iterator[None]:
            yield

    class NoYield:
        @hookimpl(wrapper=True)
        def optimizer_step(self) -> None: ...

    class NoWrapper:
        @hookimpl
        def optimizer_step(self) -> Iterator[None]:
            return (yield)

    class First:
        @hookimpl(wrapper=True, tryfirst=True)
        def optimizer_step(self) -> Iterator[None]:
            return (yield)

    class Last:
        @hookimpl(wrapper=True, trylast=True)
        def optimizer_step(self) -> Iterator[None]:
            return (yield)

    class WrapsTheEnd:
        @hookimpl(wrapper=True)
        def shutdown(self, reason: str) -> Iterator[None]:
            return (yield)

    taken = "extension:t implements optimizer_step() for optimizer_step(step, scale): "
    assert refusal(Async()) == (
        "extension:t implements observe(event) for observe(event): "
        "it is async, but hooks are never awaited; make it an ordinary function"
    )
    assert refusal(OldStyle()) == (
        taken + "hookwrapper=True hides the backend's own error; write wrapper=True and 'return (yield)'"
    )
    assert refusal(NoYield()) == taken + "a wrapper needs exactly one yield; write 'return (yield)'"
    assert refusal(NoWrapper()) == taken + "it yields but is not a wrapper; write @hookimpl(wrapper=True)"
    order = "tryfirst and trylast override the order of the config's list; remove them"
    assert refusal(First()) == refusal(Last()) == taken + order
    assert refusal(WrapsTheEnd()) == (
        "extension:t implements shutdown(reason) for shutdown(reason): "
        "shutdown is called on each plugin separately and cannot be wrapped; implement it without wrapper=True"
    )


def test_an_extension_may_not_answer_in_the_backends_place() -> None:
    class Steals:
        @hookimpl
        def optimizer_step(self, step: Any) -> str:
            return "stolen"

    assert refusal(Steals()) == (
        "extension:t implements optimizer_step itself, which only backend:mine may do; "
        "to wrap it, use @hookimpl(wrapper=True) and end with 'return (yield)'"
    )


def test_a_backend_must_implement_each_required_hook_exactly_once() -> None:
    class Forgets(Backend):
        def save(self, path: Any, step: Any, background: Any) -> str:  # overriding loses the mark
            return "save"

    class Twice(Backend):
        @hookimpl(specname="optimizer_step")
        def step_too(self, step: Any) -> str:
            return "optimizer_step"

    for backend, found in ((Forgets(), "save not at all"), (Twice(), "optimizer_step 2 times")):
        hook = found.partition(" ")[0]
        arguments = {"save": "(path, step, background)", "optimizer_step": "(step, scale)"}[hook]
        with pytest.raises(ContractError) as caught:
            registered(backend=backend)
        assert caught.value.message == (
            f"backend:mine implements {found}, expected exactly one method without wrapper=True: {hook}{arguments}"
        )


def test_a_backend_does_not_observe() -> None:
    class Curious(Backend):
        @hookimpl
        def observe(self, event: Any) -> None: ...

    with pytest.raises(ContractError, match="backend:mine implements observe, which only extensions may do"):
        registered(backend=Curious())


def test_one_name_stands_for_one_plugin() -> None:
    class Watches:
        @hookimpl
        def observe(self, event: Any) -> None: ...

    with pytest.raises(ContractError, match="extension:t is listed twice; list each extension once"):
        registered(("extension:t", Watches()), ("extension:t", Watches()))


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
