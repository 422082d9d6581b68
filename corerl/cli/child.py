"""Run a check in a separate process: if that dies, the finding says what it was doing.

A native library that does not fit the machine ends its process with a signal, which no `except` can catch.
"""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from attrs import asdict, frozen

from corerl.messages import one_line
from corerl.plugin.spec import Finding, Level

LIMIT = 300.0  # seconds for one check: importing torch from a cold shared file system takes a minute
# Sets the doctor's own sys.path, as a plugin will see it, before the first import.
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from corerl.cli.child import main
main(sys.argv[2:])
"""


@frozen
class Begins:
    """What is about to be checked, for the report if the process dies."""

    what: str
    fix: str


Told: TypeAlias = Begins | Finding


def look(target: str, *args: Any) -> list[Finding]:
    """The findings of "module:function", called with plain arguments in a process with this one's `sys.path`.

    The function yields Begins before each check, and Findings.
    """
    return _look(target, *args)[0]


def look_each(target: str, items: Sequence[Any]) -> list[Finding]:
    """Like `look`, for a function that takes several items: one process for all of them, which is faster, and one for
    each if that dies."""
    findings, finished = _look(target, items)
    if finished or len(items) < 2:
        return findings
    return [finding for item in items for finding in look(target, [item])]


def _look(target: str, *args: Any) -> tuple[list[Finding], bool]:
    """The findings, and whether the function finished."""
    with tempfile.TemporaryDirectory(prefix="corerl-doctor-") as scratch:
        told, said = Path(scratch) / "told", Path(scratch) / "stderr"
        words = [json.dumps(sys.path), target, json.dumps(args), str(told)]
        command = [sys.executable, "-P", "-X", "faulthandler", "-c", START, *words]
        why = "nothing can catch an error there: a worker would die silently"
        try:
            with said.open("wb") as stderr:  # a pipe would stay open with what the code has started in the background
                ended = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, timeout=LIMIT
                )
            how = _how(ended.returncode, said.read_text(errors="replace"))
        except subprocess.TimeoutExpired:
            how, why = f"did not end within {LIMIT:g} s", "a run would wait as long as it takes"
        lines = told.read_text().splitlines() if told.exists() else []
    findings, begun, finished = [], Begins("starting Python", f"{sys.executable} --version"), False
    for line in lines:
        kind, data = json.loads(line)
        if kind == "finding":
            findings.append(Finding(**data | {"level": Level(data["level"])}))
        elif kind == "begins":
            begun = Begins(**data)
        else:
            finished = True
    if not finished:
        findings.append(Finding(level=Level.ERROR, what=f"{begun.what} {how}", why=why, fix=begun.fix))
    return findings, finished


def main(words: list[str]) -> None:
    """The entry point of the child process."""
    target, arguments, told = words
    with open(told, "a", encoding="utf-8") as file:
        for each in _with_surprises(_told_by(target, json.loads(arguments))):
            kind = "finding" if isinstance(each, Finding) else "begins"
            print(json.dumps([kind, asdict(each)]), file=file, flush=True)
        print(json.dumps(["finished", None]), file=file, flush=True)


def _told_by(target: str, arguments: Sequence[Any]) -> Iterator[Told]:
    module, _, function = target.partition(":")
    yield Begins(f"importing {module}", f"fix what this shows: {sys.executable} -c 'import {module}'")
    yield from getattr(importlib.import_module(module), function)(*arguments)


def _with_surprises(told: Iterable[Told]) -> Iterator[Told]:
    """Turn an unexpected error into a finding."""
    begun = Begins("the doctor", "")
    try:
        for each in told:
            if isinstance(each, Begins):
                begun = each
            yield each
    except (Exception, SystemExit) as error:
        yield Finding(
            level=Level.ERROR, what=f"{begun.what} raised {one_line(error)}", why="a run does the same", fix=begun.fix
        )


def _how(status: int, stderr: str) -> str:
    """How a process ended; for a signal, also the line of Python that was running."""
    if status >= 0:
        return f"ended its process with status {status}"
    place = re.search(r'File "(.+?)", line (\d+)', stderr.partition("Fatal Python error")[2])
    where = f" at {place[1]}:{place[2]}" if place else ""
    return f"killed its process with {signal.Signals(-status).name}{where}"
