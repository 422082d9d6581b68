"""Check that plugins keep the hook contract before any hook is called. What pluggy would notice late or never is a
ContractError here, and it shows both sides."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from inspect import Parameter
from typing import Any

import pluggy

from corerl.errors import ContractError, CorerlError, HookFailed, InsufficientResources, WorkerDied
from corerl.messages import nearest, one_line
from corerl.plugin import hooktrace
from corerl.plugin.hookspecs import REQUIRED, Hooks
from corerl.plugin.hooktrace import HookTrace
from corerl.plugin.moved import method_now
from corerl.plugin.spec import PROJECT

HOOKS = tuple(name for name in vars(Hooks) if not name.startswith("_"))
INNERMOST = "corerl"  # the host's own wrapper, on ranks that have one
DRIVER_HOOKS = ("plan_ready", "between_steps", "ranks_failed", "observe")  # of extensions on the driver alone
LIST_HOOKS = ("shutdown", *DRIVER_HOOKS)  # called plugin by plugin, so that each error and answer has a name


class HookManager(pluggy.PluginManager):
    """A plugin manager that traces hook calls if the user asks for it."""

    hook_trace: HookTrace | None = None

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if name.startswith("__"):  # a third of an object's attributes, none of them a hook
            return None
        return super().parse_hookimpl_opts(plugin, name)


def build_manager(
    plugins: Sequence[tuple[str, object]], *, hooks: Collection[str] = HOOKS, where: str = ""
) -> HookManager:
    """Register (name, instance) pairs, innermost first, after every check that concerns a single plugin.

    `hooks` are the hooks that will be called; implementing any other is an error. `where` is the process's name in the
    hook trace; "" means no trace.
    """
    manager = HookManager(PROJECT)
    manager.add_hookspecs(Hooks)
    if where and hooktrace.wanted():
        manager.hook_trace = HookTrace(where)
        manager.hook_trace.follow(manager)
    names: set[str] = set()
    for name, plugin in plugins:
        if name in names:
            raise ContractError(f"{name} is listed twice; list each extension once")
        names.add(name)
        _check_plugin(manager, name, plugin, hooks)
        manager.register(plugin, name)
    return manager


def require_instance(name: str, plugin: object) -> None:
    """Raise ContractError if `plugin` is a class: it would register, and fail at its first call."""
    if isinstance(plugin, type):
        raise ContractError(f"{name} is the class {plugin.__name__}, expected an instance; instantiate it first")


def check_backend(manager: pluggy.PluginManager, name: str) -> None:
    """Raise ContractError unless the backend alone implements each required hook, wrappers aside."""
    for hook in REQUIRED:
        owners = [impl.plugin_name for impl in getattr(manager.hook, hook).get_hookimpls() if not impl.wrapper]
        foreign = [owner for owner in owners if owner != name]
        if foreign:
            raise ContractError(
                f"{foreign[0]} implements {hook} itself, which only {name} may do; "
                "to wrap it, use @hookimpl(wrapper=True) and end with 'return (yield)'"
            )
        if len(owners) != 1:
            found = f"{len(owners)} times" if owners else "not at all"
            raise ContractError(
                f"{name} implements {hook} {found}, expected exactly one method without wrapper=True: "
                f"{hook}{_text(_specified(hook))}"
            )
    for hook in DRIVER_HOOKS:
        if any(impl.plugin_name == name for impl in getattr(manager.hook, hook).get_hookimpls()):
            raise ContractError(f"{name} implements {hook}, which only extensions may do; remove it from the backend")


def refuse_driver_hooks(manager: pluggy.PluginManager) -> None:
    """Raise ContractError for hooks of the driver in a worker, where nothing would ever call them."""
    for hook in DRIVER_HOOKS:
        for impl in getattr(manager.hook, hook).get_hookimpls():
            raise ContractError(
                f"{impl.plugin_name} implements {hook}, but it is called on the driver only; remove it, or move it to "
                "a separate extension whose spec has process=Process.DRIVER"
            )


def call_chain(manager: pluggy.PluginManager, hook: str) -> str:
    """The plugins that are called, outermost first."""
    names = [impl.plugin_name for impl in reversed(getattr(manager.hook, hook).get_hookimpls())]
    return " > ".join(name for name in names if name != INNERMOST)


def call_each(
    manager: HookManager, hook: str, *, skip: Collection[str] = (), **arguments: Any
) -> Iterator[tuple[str, BaseException]]:
    """Call a list hook's implementations one by one, outermost first; yield (plugin, error) for each that raised."""
    for impl in reversed(getattr(manager.hook, hook).get_hookimpls()):
        if impl.plugin_name in skip:
            continue
        try:
            _call(manager, hook, impl, arguments)
        except (Exception, SystemExit) as error:
            yield impl.plugin_name, error


def ask_each(
    manager: HookManager, hook: str, *, skip: Collection[str] = (), **arguments: Any
) -> Iterator[tuple[str, Any]]:
    """Call the implementations of a list hook that decides something, outermost first; yield (plugin, what it returned)
    for each. Raises the first CorerlError, with a note of the plugin's name unless it is about the run's processes; any
    other error as HookFailed."""
    for impl in reversed(getattr(manager.hook, hook).get_hookimpls()):
        if impl.plugin_name in skip:
            continue
        try:
            answer = _call(manager, hook, impl, arguments)
        except (WorkerDied, InsufficientResources):
            raise
        except CorerlError as error:
            error.add_note(f"raised in {hook} of {impl.plugin_name}")
            raise
        except (Exception, SystemExit) as error:
            failed = HookFailed(f"{impl.plugin_name}: {hook} failed: {one_line(error)}")
            failed.hook, failed.details = hook, "".join(traceback.format_exception(error))
            raise failed from error
        yield impl.plugin_name, answer


def _call(manager: HookManager, hook: str, impl: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    taken = {name: arguments[name] for name in (*impl.argnames, *impl.kwargnames) if name in arguments}
    with manager.hook_trace.call(hook, impl.plugin_name, taken) if manager.hook_trace else nullcontext():
        return impl.function(**taken)


def _check_plugin(manager: pluggy.PluginManager, name: str, plugin: object, hooks: Collection[str]) -> None:
    require_instance(name, plugin)
    marked = False
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        marked = True
        hook = options.get("specname") or attribute
        if hook not in HOOKS:
            near, moved = nearest(hook, HOOKS), method_now(hook)
            if moved and not options.get("optionalhook"):
                raise ContractError(f"{name} implements {hook!r}, which is no hook of this corerl{moved}")
            if near or not options.get("optionalhook"):
                hint = f"did you mean {near!r}?" if near else f"known hooks: {', '.join(HOOKS)}"
                raise ContractError(f"{name} implements unknown hook {hook!r}; {hint}")
            continue
        if hook not in hooks:
            raise ContractError(
                f"{name} implements {hook}, which is called in workers only; its spec must have process=Process.WORKER"
            )
        function = inspect.unwrap(getattr(plugin, attribute))
        flaw = _flaw(hook, options, function)
        if flaw:
            raise ContractError(
                f"{name} implements {attribute}{_text(inspect.signature(function))} "
                f"for {hook}{_text(_specified(hook))}: {flaw}"
            )
    if not marked:
        raise ContractError(f"{name} implements no hook; mark its methods with @hookimpl (from corerl import hookimpl)")


def _flaw(hook: str, options: Any, function: Callable[..., Any]) -> str:
    """What is wrong with one implementation, and what to do about it; "" if nothing is."""
    if options.get("hookwrapper"):
        return "hookwrapper=True hides the backend's own error; write wrapper=True and 'return (yield)'"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "it is async, but hooks are never awaited; make it an ordinary function"
    wrapper = bool(options.get("wrapper"))
    if wrapper and hook in LIST_HOOKS:
        return f"{hook} is called on each plugin separately and cannot be wrapped; implement it without wrapper=True"
    if wrapper and not inspect.isgeneratorfunction(function):
        return "a wrapper needs exactly one yield; write 'return (yield)'"
    if inspect.isgeneratorfunction(function) and not wrapper:
        return "it yields but is not a wrapper; write @hookimpl(wrapper=True)"
    if options.get("tryfirst") or options.get("trylast"):
        return "tryfirst and trylast override the order of the config's list; remove them"
    return _argument_flaw(hook, function)


def _argument_flaw(hook: str, function: Callable[..., Any]) -> str:
    known = list(_specified(hook).parameters)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue  # still there on a method that another decorator hides
        if parameter.kind is Parameter.KEYWORD_ONLY:
            return f"keyword-only parameter {parameter.name!r} is never passed; move it before the '*'"
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            return f"parameter {parameter.name!r} is positional-only; remove the '/'"
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            return f"star parameter {parameter.name!r} receives nothing; name the arguments you need"
        if parameter.name not in known and parameter.default is Parameter.empty:
            return f"parameter {parameter.name!r} does not exist in the hook; rename it or give it a default"
    return ""


@functools.cache
def _specified(hook: str) -> inspect.Signature:
    signature = inspect.signature(getattr(Hooks, hook))
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])


def _text(signature: inspect.Signature) -> str:
    """The parameters as text, without annotations."""
    bare = [p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
