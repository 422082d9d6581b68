"""Create the extensions a config lists and send them events; one that raises is disabled and the run goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from corerl.config.schema import ExtensionChoice
from corerl.errors import ContractError, CorerlError, PluginBroken
from corerl.messages import note, one_line, printable
from corerl.plugin.contract import Extensions
from corerl.plugin.events import Event, Notice
from corerl.plugin.hooks import DRIVER_HOOKS
from corerl.plugin.registry import Kind, Loaded, load, load_implementation, options_of
from corerl.plugin.spec import Process

ON_DRIVER = (*DRIVER_HOOKS, "shutdown")


class Observers:
    """The driver's extensions, (name, instance) pairs in the config's order. No error in `observe` ends the run; one in
    a hook that decides does. Notices go to `notify`, by default to stderr, if none of the extensions named in `showing`
    is there to show them.

    Raises ContractError if one does not keep the contract.
    """

    def __init__(
        self,
        extensions: Sequence[tuple[str, object]],
        *,
        showing: Collection[str] = (),
        notify: Callable[[str], None] = note,
    ) -> None:
        self._extensions = Extensions(extensions, hooks=ON_DRIVER)
        self._silenced: set[str] = set()  # extensions that have raised
        self._notify = notify
        self._showing = {f"extension:{name}" for name in showing}
        self._closed = False
        self._emitting = threading.RLock()

    def emit(self, event: Event) -> None:
        """Send `event` to every observer, in the config's order; one event at a time, from any thread. Events after
        `shutdown` are dropped."""
        with self._emitting:
            if self._closed:
                return
            for name, error in self._extensions.call_each("observe", skip=self._silenced, event=event):
                self._silenced.add(name)
                what = f"observe({type(event).__name__})"
                print(
                    f"warning: {name} is disabled because {what} raised {printable(one_line(error))}", file=sys.stderr
                )
            if isinstance(event, Notice) and self._showing <= self._silenced:
                self._notify(event.text)

    def ask(self, hook: str, **arguments: Any) -> None:
        """Call a hook that decides something, in the config's order. Raises the first error, with the extension's
        name. An extension that was disabled is not asked."""
        for _ in self._extensions.ask_each(hook, skip=self._silenced, **arguments):
            pass

    def shutdown(self, reason: str) -> None:
        """Shut down each extension; a second call does nothing."""
        with self._emitting:
            if self._closed:
                return
            self._closed = True
            for name, error in self._extensions.call_each("shutdown", reason=reason):
                print(f"warning: shutdown of {name} raised {printable(one_line(error))}", file=sys.stderr)


def load_observers(
    choices: Sequence[ExtensionChoice], run_dir: str, own: Sequence[tuple[str, object]] = ()
) -> Observers:
    """The run's own observers, then the extensions that run on the driver; their options may be plain tables or already
    resolved."""
    specs = {loaded.name: loaded.spec for _, loaded in extensions_for(choices, Process.DRIVER)}
    extensions = load_extensions(choices, run_dir, Process.DRIVER)
    for name, extension in extensions:
        if hasattr(extension, "plan_ready") and not specs[name].plans:
            raise ContractError(
                f"extension:{name} implements plan_ready, which is not called; set plans=True in its spec"
            )
    return Observers([*own, *extensions], showing=[name for name, spec in specs.items() if spec.shows_notices])


def load_planners(choices: Sequence[ExtensionChoice], run_dir: str) -> Extensions:
    """The extensions whose specs say that they plan, constructed to be asked about a plan, and for nothing else."""
    planners = [choice for choice, loaded in extensions_for(choices, Process.DRIVER) if loaded.spec.plans]
    return Extensions(load_extensions(planners, run_dir, Process.DRIVER), hooks=ON_DRIVER)


def traced(choices: Sequence[ExtensionChoice]) -> bool:
    """Whether an extension on the driver wants a `CallFinished` event for every call."""
    return any(loaded.spec.traces for _, loaded in extensions_for(choices, Process.DRIVER))


def extensions_for(choices: Sequence[ExtensionChoice], process: Process) -> list[tuple[ExtensionChoice, Loaded]]:
    """The `choices` that run in `process`, in order, with their specs."""
    pairs = [(choice, load(Kind.EXTENSIONS, choice.name)) for choice in choices]
    return [(choice, loaded) for choice, loaded in pairs if loaded.spec.process is process]


def load_extensions(choices: Sequence[ExtensionChoice], run_dir: str, process: Process) -> list[tuple[str, object]]:
    """The names and instances of the extensions that run in `process`, in order."""
    return [
        (loaded.name, _instance(loaded, choice.options, run_dir)) for choice, loaded in extensions_for(choices, process)
    ]


def _instance(loaded: Loaded, options: Any, run_dir: str) -> object:
    options = options_of(loaded, options, path=f"extensions.{loaded.name}.options")
    implementation = load_implementation(Kind.EXTENSIONS, loaded)
    try:
        return implementation(options=options, run_dir=run_dir)
    except CorerlError:
        raise
    except Exception as error:
        raise PluginBroken(
            f"extension {loaded} cannot be started: {loaded.spec.implementation}(options, run_dir) raised "
            f"{one_line(error)}"
        ) from error
