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
from corerl.plugin import Finding, Level

LIMIT = 300.0  # seconds for one check: importing torch from a cold shared file system takes a minute
# Sets the doctor's own sys.path, as a plugin will see it, before the first import.
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from corerl_doctor.child import main
main(sys.argv[2:])
"""


@frozen
class CheckStarted:
    """What is about to be checked, for the report if the process dies."""

    what: str
    fix: str


Report: TypeAlias = CheckStarted | Finding


def run_check(target: str, *args: Any) -> list[Finding]:
    """The findings of "module:function", called with plain arguments in a process with this one's `sys.path`.

    The function yields CheckStarted before each check, and Findings.
    """
    return _run_check(target, *args)[0]


def run_checks(target: str, items: Sequence[Any]) -> list[Finding]:
    """Like `run_check`, for a function that takes several items: one process for all of them, which is faster, and one
    for each if that dies."""
    findings, finished = _run_check(target, items)
    if finished or len(items) < 2:
        return findings
    return [finding for item in items for finding in run_check(target, [item])]


def _run_check(target: str, *args: Any) -> tuple[list[Finding], bool]:
    """The findings, and whether the function finished."""
    with tempfile.TemporaryDirectory(prefix="corerl-doctor-") as scratch:
        reports, errors = Path(scratch) / "reports", Path(scratch) / "stderr"
        words = [json.dumps(sys.path), target, json.dumps(args), str(reports)]
        command = [sys.executable, "-P", "-X", "faulthandler", "-c", START, *words]
        why = "nothing can catch an error there: a worker would die silently"
        try:
            with errors.open("wb") as stderr:  # a pipe would stay open with what the code has started in the background
                ended = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, timeout=LIMIT
                )
            how = _how(ended.returncode, errors.read_text(errors="replace"))
        except subprocess.TimeoutExpired:
            how, why = f"did not end within {LIMIT:g} s", "a run would wait as long as it takes"
        lines = reports.read_text().splitlines() if reports.exists() else []
    findings, started, finished = [], CheckStarted("starting Python", f"{sys.executable} --version"), False
    for line in lines:
        kind, data = json.loads(line)
        if kind == "finding":
            findings.append(Finding(**data | {"level": Level(data["level"])}))
        elif kind == "started":
            started = CheckStarted(**data)
        else:
            finished = True
    if not finished:
        findings.append(Finding(level=Level.ERROR, what=f"{started.what} {how}", why=why, fix=started.fix))
    return findings, finished


def main(words: list[str]) -> None:
    """The entry point of the child process."""
    target, arguments, reports = words
    with open(reports, "a", encoding="utf-8") as file:
        for each in _with_surprises(_reports_of(target, json.loads(arguments))):
            kind = "finding" if isinstance(each, Finding) else "started"
            print(json.dumps([kind, asdict(each)]), file=file, flush=True)
        print(json.dumps(["finished", None]), file=file, flush=True)


def _reports_of(target: str, arguments: Sequence[Any]) -> Iterator[Report]:
    module, _, function = target.partition(":")
    yield CheckStarted(f"importing {module}", f"fix what this shows: {sys.executable} -c 'import {module}'")
    yield from getattr(importlib.import_module(module), function)(*arguments)


def _with_surprises(reports: Iterable[Report]) -> Iterator[Report]:
    """Turn an unexpected error into a finding."""
    started = CheckStarted("the doctor", "")
    try:
        for each in reports:
            if isinstance(each, CheckStarted):
                started = each
            yield each
    except (Exception, SystemExit) as error:
        yield Finding(
            level=Level.ERROR,
            what=f"{started.what} raised {one_line(error)}",
            why="a run does the same",
            fix=started.fix,
        )


def _how(status: int, stderr: str) -> str:
    """How a process ended; for a signal, also the line of Python that was running."""
    if status >= 0:
        return f"ended its process with status {status}"
    place = re.search(r'File "(.+?)", line (\d+)', stderr.partition("Fatal Python error")[2])
    where = f" at {place[1]}:{place[2]}" if place else ""
    return f"killed its process with {signal.Signals(-status).name}{where}"
