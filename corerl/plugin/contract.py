"""Check that plugins keep the hook contract before any hook is called, and call their hooks."""

from __future__ import annotations

import difflib
import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any

from attrs import frozen

from corerl.errors import ContractError, CorerlError, HookFailed, InsufficientResources, WorkerDied
from corerl.messages import one_line
from corerl.plugin.hooks import BACKEND_HOOKS, DRIVER_HOOKS, Hooks

HOOKS = tuple(name for name in vars(Hooks) if not name.startswith("_"))
WORKER_HOOKS = (*BACKEND_HOOKS, "shutdown")
SIMILAR = 0.85  # of a method's name to a hook's, by difflib: it is taken for a slip


@frozen
class Method:
    """One plugin's implementation of a hook."""

    plugin: str
    hook: str
    function: Callable[..., Any]
    takes: tuple[str, ...]  # of the hook's arguments

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        return self.function(**{name: arguments[name] for name in self.takes if name in arguments})


def backend_methods(name: str, backend: object) -> dict[str, Method]:
    """The backend's hooks. Raises ContractError if it lacks one, or has a driver's."""
    found = _methods(name, backend, WORKER_HOOKS)
    for hook in BACKEND_HOOKS:
        if hook not in found:
            raise ContractError(f"{name} does not implement {hook}{_text(_specified(hook))}")
    return found


class Extensions:
    """The extensions of one process, (name, instance) pairs in the config's order, outermost first. Raises
    ContractError if one does not keep the contract, or has a hook that is not of `hooks`, those that are called in this
    process."""

    def __init__(self, extensions: Sequence[tuple[str, object]], *, hooks: Collection[str]) -> None:
        self._methods: dict[str, dict[str, Method]] = {}
        for name, extension in extensions:
            label = f"extension:{name}"
            if label in self._methods:
                raise ContractError(f"{label} is listed twice; list each extension once")
            self._methods[label] = _extension_methods(label, extension, hooks)

    def having(self, hook: str, *, skip: Collection[str] = ()) -> list[Method]:
        """The implementations of a hook, but for those of plugins in `skip`."""
        return [own[hook] for name, own in self._methods.items() if hook in own and name not in skip]

    def wrapped(self, innermost: Method, arguments: Mapping[str, Any]) -> Any:
        """Call a hook of the backend inside of its wrappers."""
        return _call_wrapped([*self.having(innermost.hook), innermost], arguments)

    def call_each(
        self, hook: str, *others: Method, skip: Collection[str] = (), **arguments: Any
    ) -> Iterator[tuple[str, BaseException]]:
        """Call the implementations one by one, `others` last; yield (plugin, error) for each that raised."""
        for method in (*self.having(hook, skip=skip), *others):
            try:
                method(arguments)
            except (Exception, SystemExit) as error:
                yield method.plugin, error

    def ask_each(self, hook: str, *, skip: Collection[str] = (), **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Call the implementations of a hook that decides something; yield (plugin, what it returned) for each. Raises
        the first CorerlError, with a note of the plugin's name unless it is about the run's processes; any other error
        as HookFailed."""
        for method in self.having(hook, skip=skip):
            try:
                answer = method(arguments)
            except (WorkerDied, InsufficientResources):
                raise
            except CorerlError as error:
                error.add_note(f"raised in {hook} of {method.plugin}")
                raise
            except (Exception, SystemExit) as error:
                failed = HookFailed(f"{method.plugin}: {hook} failed: {one_line(error)}")
                failed.hook, failed.details = hook, "".join(traceback.format_exception(error))
                raise failed from error
            yield method.plugin, answer


def call_chain(extensions: Extensions, innermost: Method) -> str:
    """The plugins that are called, outermost first."""
    return " > ".join(each.plugin for each in (*extensions.having(innermost.hook), innermost))


def _call_wrapped(chain: Sequence[Method], arguments: Mapping[str, Any]) -> Any:
    """Call the last method inside of the others, generators which get its result, or its error, where they yield."""
    outer, *inner = chain
    if not inner:
        return outer(arguments)
    generator = outer(arguments)
    try:
        next(generator)
        try:
            result = _call_wrapped(inner, arguments)
        except BaseException as error:
            generator.throw(error)
        else:
            generator.send(result)
    except StopIteration as end:
        return end.value
    generator.close()
    raise ContractError(f"{outer.plugin}: {outer.hook} yields twice; yield once, and return the result")


# ---- checks ----------------------------------------------------------------------------------------------------------


def require_instance(name: str, plugin: object) -> None:
    if isinstance(plugin, type):
        raise ContractError(f"{name} is the class {plugin.__name__}, expected an instance; instantiate it first")


def _extension_methods(name: str, extension: object, hooks: Collection[str]) -> dict[str, Method]:
    require_instance(name, extension)
    found = _methods(name, extension, hooks)
    for hook, method in found.items():
        if hook in BACKEND_HOOKS and not inspect.isgeneratorfunction(inspect.unwrap(method.function)):
            raise ContractError(
                f"{name} implements {hook} itself, which only a backend may do; to wrap it, end with 'return (yield)'"
            )
    for attribute in dir(type(extension)):
        near = [] if attribute in HOOKS else difflib.get_close_matches(attribute, HOOKS, n=1, cutoff=SIMILAR)
        if near:
            raise ContractError(f"{name} has {attribute!r}; did you mean the hook {near[0]!r}? Else rename it")
    if not found:
        raise ContractError(f"{name} implements no hook; known hooks: {', '.join(HOOKS)}")
    return found


def _methods(name: str, plugin: object, hooks: Collection[str]) -> dict[str, Method]:
    found = {}
    for hook in HOOKS:
        function = getattr(plugin, hook, None)
        if function is None:
            continue
        if hook not in hooks:
            where, process = ("on the driver", "DRIVER") if hook in DRIVER_HOOKS else ("in workers", "WORKER")
            raise ContractError(
                f"{name} implements {hook}, but it is called {where} only; remove it, or move it to an extension whose "
                f"spec has process=Process.{process}"
            )
        found[hook] = Method(name, hook, function, _taken(name, hook, function))
    return found


def _taken(name: str, hook: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The hook's arguments that a plugin's function takes."""
    known = _specified(hook).parameters
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        passed = parameter.kind is Parameter.VAR_KEYWORD or (parameter.name in known and parameter.kind in BY_NAME)
        if not passed and parameter.default is Parameter.empty:
            if parameter.kind is Parameter.VAR_POSITIONAL:
                change = f"arguments are passed by name, so *{parameter.name} gets none; name those that it needs"
            else:
                change = f"parameter {parameter.name!r} is not passed by name; rename it or give it a default"
            raise ContractError(
                f"{name} implements {hook}{_text(signature)} for {hook}{_text(_specified(hook))}: {change}"
            )
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return tuple(known)
    return tuple(each for each in known if each in signature.parameters)


BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@functools.cache
def _specified(hook: str) -> inspect.Signature:
    signature = inspect.signature(getattr(Hooks, hook))
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])


def _text(signature: inspect.Signature) -> str:
    """The parameters as text, without annotations."""
    bare = [p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
