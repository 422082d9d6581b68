"""Import plugins and the user's modules in another process first: one that ends its process would end the command with
no word, and with whatever status it likes."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from corerl.cli.child import Told
    from corerl.plugin.registry import Entry, Kind

T = TypeVar("T")
PIP = "python -m pip"


def require_plugins(plugins: Sequence[tuple[Kind, str]]) -> None:
    """Raise UserError, in one line, if importing the spec of one of these ends its process."""
    beside([], plugins)()


def fatal_plugins(kind: Kind, names: Sequence[str]) -> dict[str, str]:
    """Those of the plugins whose spec ends the process that imports it, each with what happened."""
    from corerl.errors import UserError

    fatal: dict[str, str] = {}
    for name in names:
        try:
            require_plugins([(kind, name)])
        except UserError as error:
            fatal[name] = error.message
    return fatal


def in_fork(function: Callable[[], T]) -> T | None:
    """What `function` returns in a fork of this process, which imports what it needs; None if the fork ended before, or
    takes longer than `child.LIMIT`."""
    from corerl.cli.child import LIMIT

    reader, writer = os.pipe()
    if not (process := os.fork()):
        try:
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(function(), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        if not select.select([pipe], [], [], LIMIT)[0]:
            os.kill(process, signal.SIGKILL)
        answer = pipe.read()
    os.waitpid(process, 0)
    return pickle.loads(answer) if answer else None


def beside(modules: Sequence[str], plugins: Sequence[tuple[Kind, str]]) -> Callable[[], None]:
    """Start to import these in another process, beside this one; call the result to wait for it. That raises UserError,
    in one line, if an import ended its process. An import that merely raises is reported by whoever needs it."""
    from corerl.cli.child import look
    from corerl.errors import UserError
    from corerl.plugin.spec import Finding

    # What comes with CoreRL ends no process: a run of nothing else needs no trial.
    foreign = [(kind.value, name) for kind, name in plugins if not _own(kind, name)]
    found: list[Finding] = []
    if not foreign and not modules:
        return lambda: None
    thread = threading.Thread(
        target=lambda: found.extend(look("corerl.cli.trial:look_imports", list(modules), foreign)),
        name="trial of imports",
        daemon=True,
    )
    thread.start()

    def result() -> None:
        thread.join()
        for finding in found:
            raise UserError(f"{finding.what}; {finding.fix}")

    return result


def look_imports(modules: Sequence[str], plugins: Sequence[tuple[str, str]]) -> Iterator[Told]:
    """Import what a driver imports: these modules, and the spec of each (value of Kind, name). Errors that can be
    caught are left to the driver."""
    from corerl.cli.child import Begins
    from corerl.errors import PluginError
    from corerl.plugin.registry import Kind, load, locate

    for module in modules:
        yield Begins(f"importing {module}", f"fix {module}")
        with contextlib.suppress(BaseException):
            importlib.import_module(module)
    for kind, name in plugins:
        entry = locate(Kind(kind), name)
        yield Begins(f"importing {entry.value}, the spec of {Kind(kind).noun} {entry},", reinstall(entry))
        with contextlib.suppress(PluginError):
            load(Kind(kind), name)


def reinstall(entry: Entry) -> str:
    if not entry.distribution:
        return f"fix {entry.value}, searched in the installed packages and then in {sys.path[-1]}"
    return f"{PIP} install --force-reinstall {entry.distribution}"


def _own(kind: Kind, name: str) -> bool:
    """Whether it comes with CoreRL: in its own wheel, or in one that it says how to install."""
    from corerl.errors import PluginError
    from corerl.plugin.registry import INSTALL_HINTS, locate

    try:
        entry = locate(kind, name)
    except PluginError:  # there is nothing to import
        return True
    return entry.value.startswith("corerl.") or entry.name in INSTALL_HINTS[kind]
