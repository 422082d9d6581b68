"""What all benchmarks share: rounds in turns, rows of ratios, and the result with a description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import AttrsInstance, asdict, evolve, field, fields, frozen

DIFFERENT = "THE FIRST GRADIENTS DIFFER: the two sides do not do the same work, so the ratio is meaningless."
ROOT = Path(__file__).resolve().parent.parent
C = TypeVar("C", bound=AttrsInstance)  # a benchmark's class of cases


@frozen(kw_only=True)
class Comparison:
    """The same work done by CoreRL and by something else, in turns."""

    what: str
    against: str
    ours: Sequence[float]  # seconds, one a round
    other: Sequence[float]  # seconds, one a round; round n of both were neighbors in time
    target: float | None = None  # that the ratio should not exceed

    @property
    def ratios(self) -> list[float]:
        return [ours / other for ours, other in zip(self.ours, self.other, strict=True)]

    def row(self) -> list[str]:
        ratio = statistics.median(self.ratios)
        return [
            f"{self.what} / {self.against}",
            seconds(self.ours),
            seconds(self.other),
            f"**{ratio:.2f}** ({min(self.ratios):.2f} to {max(self.ratios):.2f})",
            *verdict(ratio, self.target, f"≤ {self.target}"),
        ]


@frozen(kw_only=True)
class Number:
    """Something that stands for itself."""

    what: str
    values: Sequence[float]  # one a round
    unit: str  # s (seconds), or any word
    target: float | None = None  # that the median should not exceed

    def row(self) -> list[str]:
        median = statistics.median(self.values)
        shown = seconds(self.values) if self.unit == "s" else spread(self.values, self.unit)
        bound = "" if self.target is None else seconds([self.target]) if self.unit == "s" else f"{self.target:g}"
        return [self.what, shown, "", "", *verdict(median, self.target, f"≤ {bound}")]


@frozen(kw_only=True)
class Report:
    """What one benchmark found."""

    name: str
    size: str  # of the work, in words
    comparisons: Sequence[Comparison] = ()
    numbers: Sequence[Number] = ()
    note: str = ""  # what is inside the measured part, and what is not
    versions: Mapping[str, str] = field(factory=dict)  # of packages

    def rows(self) -> list[list[str]]:
        return [each.row() for each in self.comparisons] + [each.row() for each in self.numbers]


def verdict(value: float, target: float | None, bound: str) -> list[str]:
    """The target in words, and whether it is met."""
    if target is None:
        return ["", ""]
    return [bound, "yes" if value <= target else "**no**"]


def seconds(values: Sequence[float]) -> str:
    """Median and spread, in the unit that reads best."""
    if statistics.median(values) < 1.0:
        return spread([1e3 * value for value in values], "ms")
    return spread(values, "s")


def spread(values: Sequence[float], unit: str) -> str:
    median = f"{statistics.median(values):.3g} {unit}"
    return median if len(values) == 1 else f"{median} ({min(values):.3g} to {max(values):.3g})"


def in_turns(rounds: int, ours: Callable[[int], float], other: Callable[[int], float]) -> tuple[list[float], ...]:
    """`rounds` results of each, (ours, other). Who comes first changes every round: what comes second may find a warmer
    machine, or a hotter one."""
    results: tuple[list[float], ...] = ([], [])
    for number in range(rounds):
        pair = [(results[0], ours), (results[1], other)]
        for into, measure in pair if number % 2 == 0 else reversed(pair):
            into.append(measure(number))
    return results


def arguments(
    doc: str | None,
    *,
    rounds: int = 0,
    deadline: float = 0.0,
    settings: str = "",
    tiny: bool = True,
    output: str = "a JSON file, written again after each part; without it a table is printed",
) -> argparse.ArgumentParser:
    """The command line of a benchmark with these of the options that several have. Its models come from no network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    command = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        command.add_argument("--rounds", type=int, default=rounds, help=f"of each side, in turns (default: {rounds})")
    if deadline:
        command.add_argument("--deadline", type=float, default=deadline, help="seconds of a run, its start included")
    if settings:
        command.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help=settings)
    if tiny:
        command.add_argument("--tiny", action="store_true", help="small sizes on a CPU, to see that everything runs")
    command.add_argument("--output", help=output)
    return command


def changed(case: C, command: argparse.ArgumentParser, args: argparse.Namespace) -> C:
    """The case with what the command line says of the fields that `add_fields` has added."""
    given = {name: value for name in command.get_default("fields") if (value := getattr(args, name)) is not None}
    return evolve(case, **given)  # type: ignore[misc]  # of a type variable


def add_fields(command: argparse.ArgumentParser, case: type[Any], *names: str) -> None:
    """An option for each of these fields of a case, of the type of its default."""
    for name in names:
        kind = type(getattr(fields(case), name).default)
        how: dict[str, Any] = {"action": "store_true", "default": None} if kind is bool else {"type": kind}
        command.add_argument(f"--{name.replace('_', '-')}", help="in place of the case's", **how)
    command.set_defaults(fields=names)


def finish(report: Report, output: str | None) -> None:
    """Write it as JSON, with what it was measured on, or print its table."""
    if output:
        facts = {**machine(), "commit": commit(), "command": shlex.join(["python", *sys.orig_argv[1:]])}
        Path(output).write_text(json.dumps({"facts": facts, **asdict(report)}))
    else:
        print(table([report]))


def tell(name: str, reports: Sequence[Report], output: str | None) -> None:
    """Print the newest of a program's reports, and write all: a command that is cut off leaves what it found."""
    print(f"{reports[-1].size}\n\n{table(reports[-1:])}\n\n{reports[-1].note}\n", flush=True)
    if output:
        finish(joined(name, reports), output)


def joined(name: str, reports: Sequence[Report]) -> Report:
    """Of several cases or parts of one benchmark."""
    versions: dict[str, str] = {}
    for report in reports:
        versions |= report.versions
    return Report(
        name=name,
        size="; ".join(dict.fromkeys(report.size for report in reports)),
        comparisons=[each for report in reports for each in report.comparisons],
        numbers=[each for report in reports for each in report.numbers],
        note=" ".join(dict.fromkeys(filter(None, (report.note for report in reports)))),
        versions=versions,
    )


def table(reports: Sequence[Report]) -> str:
    """All rows as one markdown table."""
    lines = [
        "| benchmark | CoreRL / against | CoreRL | the other | ratio, median (spread) | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [(report.name, *row) for report in reports for row in report.rows()]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def finish_page(
    title: str, parts: Sequence[str], output: str | None, *, packages: Mapping[str, str], command: str
) -> None:
    """Write the parts as a page of markdown that says what they were measured on, or print it."""
    facts = {**machine(), "Python": platform.python_version(), **packages, "commit": commit()}
    facts["command"] = f"`{shlex.join(['python', '-m', command, *sys.argv[1:]])}`"
    about = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = "\n\n".join([f"# {title}", about, *parts]) + "\n"
    if output:
        Path(output).write_text(text)
    else:
        print(text)


def machine() -> dict[str, str]:
    cpus = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "CPU": cpus[0] if cpus else platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{memory[0] / 2**20:.1f} GiB" if memory else "unknown",
        "system": platform.platform(),
    }


def commit() -> str:
    """The checkout's commit, and whether files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if not shutil.which("git"):
        return "unknown"
    changed = len(git("status", "--porcelain").splitlines())
    return (git("rev-parse", "HEAD") or "unknown") + (f", with {changed} changed files" if changed else "")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []  # no Linux
