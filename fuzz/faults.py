"""Plant faults in `corerl/`, one at a time, and count how many the quick tests catch.

    .venv/bin/python -m fuzz.faults --count 120 --seed 1

A fault is a small change to the syntax tree at a random place. It exists only in the forked process that runs the
tests: no file is edited. The tests are those that run the changed line, by a coverage map of the quick tests, which is
made once per commit, outside the tree. Lines that no quick test runs are counted apart, as "only processes".
Some faults change nothing that matters (equivalent mutants), so no suite reaches 100 %.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from attrs import frozen
from coverage import CoverageData

TESTS, SECONDS = 40, 120.0  # for each fault, at most
QUICK = ["-m", "not processes", "-p", "no:cacheprovider", "-q"]
# Where torch and transformers are imported before pytest, so is a plugin of pytest that one of them needs.
FORKED = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-x", "-p", "no:xdist"]
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
LEFT_OUT = ("annotation", "exc", "decorator_list")
FLIPPED = {**dict(PAIRS), **{other: one for one, other in PAIRS}}


@frozen
class Fault:
    kind: str
    file: str  # in the tree
    node: ast.expr | ast.stmt  # to be replaced by `text`
    text: str
    lines: range  # whose tests are run; empty for what runs at import


def faults_of(file: str, source: str) -> list[Fault]:
    """Every fault that can be planted in one file, but in messages, annotations, and what only type checkers read."""
    return list(_within(file, ast.parse(source), range(0)))


def _within(file: str, node: ast.AST, lines: range) -> Iterator[Fault]:
    for name, value in ast.iter_fields(node):
        for child in [] if name in LEFT_OUT else value if isinstance(value, list) else [value]:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                body = range(child.body[0].lineno, (child.end_lineno or 0) + 1)
                for default in [*child.args.defaults, *child.args.kw_defaults]:
                    if isinstance(default, ast.Constant) and (text := _other(default)):
                        yield Fault("default changed", file, default, text, body)
                for statement in child.body:
                    yield from _at(file, statement, _lines(statement))
            elif isinstance(child, ast.expr | ast.stmt):
                yield from _at(file, child, _lines(child) if lines else lines)
            elif isinstance(child, ast.AST) and not isinstance(child, ast.arguments):
                yield from _within(file, child, lines)


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)


def _at(file: str, node: ast.expr | ast.stmt, lines: range) -> Iterator[Fault]:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
        return
    changed = copy.copy(node)
    match changed:
        case ast.Compare(ops=[op]):
            changed.ops = [FLIPPED[type(op)]()]
            yield Fault("comparison flipped", file, node, f"({ast.unparse(changed)})", lines)
        case ast.BoolOp(op=op):
            changed.op = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield Fault("and/or swapped", file, node, f"({ast.unparse(changed)})", lines)
        case ast.Constant() if text := _other(changed):
            yield Fault("constant changed", file, node, text, lines)
        case ast.Call(args=[first, second, *rest]):
            changed.args = [second, first, *rest]
            if ast.unparse(changed) != ast.unparse(node):
                yield Fault("arguments swapped", file, node, ast.unparse(changed), lines)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield Fault(
                "condition negated", file, test, f"(not ({ast.unparse(test)}))", _lines(test) if lines else lines
            )
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() if lines:
            yield Fault("statement dropped", file, node, "pass", lines)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if lines:
            yield Fault("statement dropped", file, node, "pass", lines)
    yield from _within(file, node, lines)


def _other(node: ast.Constant) -> str:
    """Another value of the constant's type; "" for text and None."""
    if isinstance(node.value, bool):
        return str(not node.value)
    return repr(node.value + 1) if isinstance(node.value, int | float) else ""


def planted(source: str, fault: Fault) -> str:
    lines = source.encode().splitlines(keepends=True)  # an offset counts bytes
    node = fault.node
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[end_line - 1][end:] + b"".join(lines[end_line:])
    return (before + fault.text.encode() + after).decode()


def make_map(directory: Path, jobs: int) -> None:
    """Run the quick tests once, with the lines that each runs, and the time that each takes."""
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    environment = {**os.environ, "COVERAGE_FILE": str(unfinished / "coverage")}
    command = [sys.executable, "-m", "pytest", *QUICK, "-n", str(jobs), "--dist", "loadfile", "--cov=corerl"]
    command += ["--cov-context=test", "--cov-report=", f"--junitxml={unfinished}/tests.xml"]
    with (unfinished / "out.txt").open("w") as out:
        subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
    unfinished.rename(directory)


class Map:
    """Which quick tests run a line."""

    def __init__(self, directory: Path, tree: Path) -> None:
        self._tree, self._data = tree, CoverageData(str(directory / "coverage"))
        self._data.read()
        self._seconds = {
            f"{case.attrib['classname'].replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
            for case in ElementTree.parse(directory / "tests.xml").iter("testcase")
            if case.find("failure") is None and case.find("error") is None
        }

    def tests(self, fault: Fault) -> list[str]:
        """Those of the file's mirror first, then the fastest."""
        by_line = self._data.contexts_by_lineno(str(self._tree / fault.file))
        wanted = [by_line.get(line, []) for line in fault.lines] if fault.lines else by_line.values()
        names = {context.rpartition("|")[0] for contexts in wanted for context in contexts if "|" in context}
        folder, _, name = fault.file.removeprefix("corerl/").rpartition("/")
        mirror = f"tests/{folder}/test_{name}".replace("//", "/")
        usable = names & self._seconds.keys()
        return sorted(usable, key=lambda each: (not each.startswith(mirror), self._seconds[each], each))[:TESTS]


def run(path: str, source: str, tests: Sequence[str]) -> str:
    """The test that fails with this source in the file's place; "" if all pass."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(path, source, tests, theirs))
    process.start()
    theirs.close()
    found = "the end of its process" if wait([ours, process.sentinel], SECONDS) else "the deadline"
    with contextlib.suppress(EOFError):
        found = ours.recv() if ours.poll() else found
    process.kill()
    process.join()
    return found


def _child(path: str, source: str, tests: Sequence[str], pipe: Connection) -> None:
    import pytest

    os.setpgid(0, 0)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.dont_write_bytecode = True
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> Any:
        return compile(source, path, "exec") if self.path == path else original(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]

    class Tell:
        passed = 0

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.passed += report.when == "call" and report.passed
            if report.failed:
                pipe.send(report.nodeid)

    tell = Tell()
    status = pytest.main([*QUICK, *FORKED, *tests], plugins=[tell])
    pipe.send("" if status == 0 and tell.passed else f"pytest, which ended with {int(status)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    tree = Path.cwd()
    sys.path[0] = str(tree)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    directory = Path(tempfile.gettempdir()) / f"corerl-faults-{os.getuid()}" / commit
    if not directory.exists():
        make_map(directory, given.jobs)
    covering = Map(directory, tree)

    importlib.import_module("transformers.models.qwen3.modeling_qwen3")  # once for all forks, as all that is not ours
    sources = {str(path.relative_to(tree)): path.read_text() for path in sorted(tree.glob("corerl/**/*.py"))}
    all_faults = [fault for file, source in sources.items() for fault in faults_of(file, source)]
    kinds, chosen = sorted({fault.kind for fault in all_faults}), random.Random(given.seed)
    places = [[fault for fault in all_faults if fault.kind == kind] for kind in kinds]
    planned = [chosen.choice(places[number % len(kinds)]) for number in range(given.count)]
    counts: Counter[str] = Counter()

    def judge(fault: Fault) -> None:
        started = time.monotonic()
        tests = covering.tests(fault)
        path, source = str(tree / fault.file), sources[fault.file]
        by = run(path, planted(source, fault), tests) if tests else ""
        outcome = "only processes" if not tests else "caught" if by else "missed"
        if by and run(path, source, [by] if by in tests else tests[:1]):
            outcome = "not judged, as the test fails without the fault"
        counts[outcome] += 1
        was = " ".join((ast.get_source_segment(source, fault.node) or "").split())
        change = f"{was[:60]} -> {' '.join(fault.text.split())[:60]}"
        took = f"{len(tests)} tests, {time.monotonic() - started:.0f} s"
        print(f"{outcome}: {fault.file}:{fault.node.lineno} {fault.kind}: {change} ({took}) {by}", flush=True)

    with tempfile.TemporaryDirectory(prefix="f-") as below, ThreadPoolExecutor(given.jobs) as pool:
        tempfile.tempdir = os.environ["TMPDIR"] = below  # a child that is killed leaves its files
        list(pool.map(judge, planned))
    judged = counts["caught"] + counts["missed"]
    share = counts["caught"] / max(judged, 1)
    print(f"{counts['caught']} of {judged} caught ({share:.0%}), {counts['only processes']} only processes; {commit}")


if __name__ == "__main__":
    main()
