"""What the code knows best, as Markdown: `python docs/quoted.py` writes it into the pages, under a line
`<!-- reference: NAME -->`.

config        a table for each table of the TOML file, from corerl.config.schema
plugins       a table for each table of an engine or algorithm of CoreRL's, and of its backends that are installed
hooks         each hook with its exact arguments, from corerl.plugin.hooks
hooktypes     what hooks are given and give back, as the code of corerl.types and corerl.plugin writes it
extensions    those of CoreRL's wheels that are installed, and their options
errors        the tree of errors with their exit status, from corerl.errors
checks        the conformance suite, from the marks and names of its checks
algorithm     that of algorithms, likewise
matrix        what each backend can do, from the suite's reports in benchmarks/results/conformance
models        what becomes of each model type of transformers, from benchmarks/results/models.json
inputs        what becomes of each field of a model's files, of a request and of a directory of PEFT
users, authors, testers, wheels   the names that each package has for them, with what documents each
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import attrs

import corerl
import corerl_testing
from corerl import errors, types
from corerl.config.schema import Config, RoleConfig
from corerl.plan.plan import PlanReady
from corerl.plan.resolve import TABLES
from corerl.plugin import events, hooks
from corerl.plugin.capabilities import Capability
from corerl.plugin.hooks import Context
from corerl.plugin.registry import EXTRAS, Kind, installed_names, load, scan
from corerl.plugin.spec import PlanAnswer, Process
from corerl.types import MemoryKind
from corerl_agents.dialects import DIALECTS
from corerl_agents.fields import fields_table
from corerl_testing.algorithm_suite import CHECKS as ALGORITHM_CHECKS
from corerl_testing.marks import check_of
from corerl_testing.matrix import Status
from corerl_testing.suite import CHECKS

settings: Any = importlib.import_module("settings")  # of this directory

MODULES = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")  # in what Python prints of types
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what Python prints of objects
MODELS = Path(__file__).parent.parent.parent / "benchmarks/results/models.json"
CORE = Path(errors.__file__).parent
REPORTS = Path(__file__).parent.parent.parent / "benchmarks/results/conformance"
WORDS = ("required", "unset", "computed")  # stand where a default would; all others are TOML
FIRST_PARTY = {
    *EXTRAS[Kind.BACKENDS],
    *("transformers", "fake"),
    *(entry.name for entry in scan(Kind.ALGORITHMS) if entry.distribution in ("corerl", "corerl-algorithms")),
}
# Say again what [train] and [model] say.
REPEATED = tuple(
    f"roles.{table}." for table in ("actor.train", "critic.train", "critic.model", "teacher.train", "teacher.model")
)


def table_of(entry: Any) -> str:
    return entry.path.rpartition(".")[0]


def config_reference() -> str:
    entries = [entry for entry in settings.describe(Config) if not entry.path.startswith(REPEATED)]
    lines: list[str] = []
    for table, found in groupby(sorted(entries, key=table_of), key=table_of):
        heading = f"`[[{table[:-2]}]]`" if table.endswith("[]") else f"`[{table}]`" if table else "Top level"
        lines += [f"## {heading}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for setting in found:
            key = setting.path.removeprefix(f"{table}.")
            default = setting.default if setting.default in WORDS else f"`{setting.default}`"
            lines.append(f"| `{key}` | {setting.type} | {default} | {setting.help} |")
        lines.append("")
    return "\n".join(lines)


def options_table(config: type) -> list[str]:
    """Of a plugin's own options; nothing where it has none."""
    options = list(settings.describe(config))
    if not options:
        return []
    rows = [f"| `{each.path}` | {each.type} | `{each.default}` | {each.help} |" for each in options]
    return ["| option | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def plugins_reference() -> str:
    """Whatever else is installed where the documentation is built is not CoreRL's to describe."""
    lines: list[str] = []
    for kind in TABLES:
        for loaded in (load(kind, name) for name in installed_names(kind) if name in FIRST_PARTY):
            if table := options_table(loaded.spec.config):
                lines += [f"## `[{kind.value}.{loaded.name}]`", "", f"{loaded.spec.summary}.", "", *table]
    return "\n".join(lines)


def hook_functions() -> dict[str, Callable[..., Any]]:
    return {name: function for name, function in vars(hooks.Hooks).items() if not name.startswith("_")}


def hooks_reference() -> str:
    """A section for each hook, whose heading is its call; `hook-NAME` is what links to it."""
    lines: list[str] = []
    for name, function in hook_functions().items():
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
        call = f"{name}({', '.join(p.name for p in parameters)})"
        arguments = ", ".join(str(p).replace("'", "") for p in parameters)
        answer = inspect.signature(function).return_annotation
        verb = hooks.VERBS.get(name)
        needs = ", ".join(f"`{kind}`" for kind in MemoryKind if verb and kind in verb.needs) or "nothing"
        who = "the backend, alone" if name in hooks.BACKEND_HOOKS else "every plugin that has it"
        lines += [f"(hook-{name})=", f"### `{call}`", "", "```text", f"{name}({arguments}) -> {answer}", "```", ""]
        lines += [inspect.getdoc(function) or "", "", f"Answered by {who}. Must be resident: {needs}.", ""]
    return "\n".join(lines)


def hooktypes_reference() -> str:
    """The code of each type that a hook's signature names, and of those that these hold, in order of appearance."""
    known = {each.__name__: each for each in (Context, RoleConfig, PlanReady, PlanAnswer)}
    known |= {**vars(types), **vars(events), **vars(hooks)}
    found: dict[str, type] = {}

    def add(annotation: str) -> None:
        for word in re.findall(r"\w+", annotation):
            named = known.get(word)
            if get_origin(named) in (Union, UnionType):  # an alias, such as Event
                add(" ".join(each.__name__ for each in get_args(named)))
            elif isinstance(named, type) and word not in found and named.__module__.startswith("corerl."):
                found[word] = named
                if named is not RoleConfig:  # whose parts are tables of the configuration
                    add(" ".join(str(each.type) for each in attrs.fields(named)) if attrs.has(named) else "")

    for function in hook_functions().values():
        signature = inspect.signature(function)
        add(" ".join(str(p.annotation) for p in signature.parameters.values()) + f" {signature.return_annotation}")
    lines: list[str] = []
    for name, named in found.items():
        code = inspect.getsource(named).rstrip()
        package = ".".join(named.__module__.split(".")[:2])
        lines += [f"### `{name}`", "", f"`{package}.{name}`", "", "```python3", code, "```", ""]
    return "\n".join(lines)


USERS = ("corerl", "corerl.data", "corerl.rollout")  # packages whose names in guides are for users
IMPORTED = re.compile(r"^ *from (corerl[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


@functools.cache
def in_guides() -> set[tuple[str, str]]:
    """(package, name) for each name that a page of the documentation, an example or a new backend imports, and each
    type of what hooks are given and return."""
    root = CORE.parent
    files = [page for page in (root / "docs").rglob("*.md") if not {"_build", "reference"} & {*page.parts}]
    files += [root / "README.md", *(root / "examples").rglob("*.py")]
    files += (Path(corerl_testing.__file__).parent / "backend_template").rglob("*.py")
    found = (each for file in files for each in IMPORTED.findall(file.read_text()))
    of_hooks = re.findall(r"^`(corerl\.\w+)\.(\w+)`$", (root / "docs/reference/hooks.md").read_text(), re.MULTILINE)
    return {*of_hooks, *((package, name) for package, names in found for name in re.findall(r"\w+", names))}


def circle_of(package: str, name: str) -> str:
    if package == corerl_testing.__name__:
        return "testers"
    if package != "corerl" and (package, name) not in in_guides():
        return "wheels"
    return "users" if package in USERS else "authors"


def faces() -> dict[str, list[str]]:
    """By package, the names that its `__init__` has for others, if it has any."""
    packages: list[Any] = [corerl]
    packages += (importlib.import_module(f"corerl.{path.parent.name}") for path in sorted(CORE.glob("*/__init__.py")))
    packages.append(corerl_testing)
    return {package.__name__: package.__all__ for package in packages if hasattr(package, "__all__")}


def public_reference(circle: str) -> str:
    """The names of one circle, package by package, with their number."""
    found = {
        package: [name for name in names if circle_of(package, name) == circle] for package, names in faces().items()
    }
    shown = {package: names for package, names in found.items() if names}
    lines = [f"{sum(map(len, shown.values()))} names.", ""]
    for package, names in shown.items():
        lines += [f"### `{package}`", "", "| name | |", "|---|---|"]
        for name in names:
            value = getattr(importlib.import_module(package), name)
            if inspect.isfunction(value) or isinstance(value, type):
                paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
                text = re.split(r"(?<=[.;]) ", paragraph, maxsplit=1)[0].rstrip(".;")
            else:  # a constant or an alias, of which what it is says most
                text = "`" + (value if isinstance(value, str) else ADDRESS.sub("", MODULES.sub("", str(value)))) + "`"
            escaped = text.replace("|", "\\|")
            lines.append(f"| `{name}` | {escaped} |")
        lines.append("")
    return "\n".join(lines)


def extensions_reference() -> str:
    lines: list[str] = []
    for loaded in (load(Kind.EXTENSIONS, name) for name in installed_names(Kind.EXTENSIONS)):
        if not loaded.value.startswith(("corerl.", "corerl_")):
            continue
        where = "each rank" if loaded.spec.process is Process.WORKER else "the driver"
        summary = f"Of `{loaded.distribution}`, in {where}: {loaded.spec.summary}."
        lines += [f"### `{loaded.name}`", "", summary, ""]
        lines += options_table(loaded.spec.config)
    return "\n".join(lines)


def errors_reference() -> str:
    def walk(cls: type[errors.CorerlError], depth: int) -> Iterator[str]:
        summary = (inspect.getdoc(cls) or "").splitlines()[0]
        yield f"{'  ' * depth}- `{cls.__name__}` (exit status {cls.exit_status}): {summary}"
        for child in cls.__subclasses__():
            if child.__module__ == errors.__name__:
                yield from walk(child, depth + 1)

    return "\n".join(walk(errors.CorerlError, 0))


def checks_reference(checks: Mapping[str, Callable[..., None]]) -> str:
    """A row for each check, in the order of ids; a check on several ranks, or with variants, says so."""
    rows = []
    for name, function in checks.items():
        check = check_of(function)
        assert check is not None
        sentence = name.removeprefix("test_").replace("_", " ")
        takes_ranks = {"subject", "world_size"} & inspect.signature(function).parameters.keys()
        levels = {check.level_at(ranks) for ranks in check.ranks} if takes_ranks else {check.level}
        needs = ", ".join(f"`{capability}`" for capability in check.needs)
        at = ", ".join(map(str, sorted(levels))) + " and variants" * (check.variants is not None)
        rows.append((check.id, at, sentence, needs, ", ".join(check.builds_on)))
    lines = ["| id | level | what holds | needs | builds on |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in sorted(rows))])


def matrix_reference() -> str:
    """Capabilities by backend, and what each report counts; a backend may have several, of other machines."""
    reports: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(REPORTS.glob("*.json")):
        report = json.loads(path.read_text())
        reports.setdefault(report["backend"], []).append(report)
    lines = [f"| capability | {' | '.join(f'`{name}`' for name in reports)} |", f"|---|{'---|' * len(reports)}"]
    lines += [
        f"| `{capability}` | {' | '.join(can(each, capability) for each in reports.values())} |"
        for capability in Capability
    ]
    for name, each in reports.items():
        lines.append("")
        for report in each:
            passed = dict.fromkeys(report["levels"], 0)
            for check in report["checks"]:
                passed[check["level"]] += check["outcome"] == "passed"
            told = ", ".join(f"{count} at level {level}" for level, count in passed.items() if count)
            where = f"{report['device']}, torch {report['torch']}, corerl {report['corerl']}"
            lines.append(f"`{name}` ({report['distribution']} {report['version']}) on {where}: passed {told}.")
        lines += [""] + [
            f"- no `{name}`: {support['reason']}"
            for name, support in each[0]["capabilities"].items()
            if support["grade"] != "full"
        ]
    return "\n".join(lines)


def can(reports: Iterable[dict[str, Any]], capability: Capability) -> str:
    if any(capability not in report["capabilities"] for report in reports):
        return "not asked"  # by a suite of before there was such a thing
    if any(report["capabilities"][capability]["grade"] != "full" for report in reports):
        return "no"
    checks = [check for report in reports for check in report["checks"] if capability in check["needs"]]
    outcomes = {check["outcome"] for check in checks}
    return "yes" if "passed" in outcomes and not outcomes & {"failed", "blocked", "expected"} else "declared"


def models_reference() -> str:
    """Each type of transformers and what becomes of it, as `corerl models --check --json` has told."""
    rows = json.loads(MODELS.read_text())
    counts = {status: sum(row["status"] == status for row in rows) for status in Status}
    lines = [", ".join(f"{count} {status}" for status, count in counts.items() if count) + ".", ""]
    lines += ["| type | | why not packed | largest difference |", "|---|---|---|---|"]
    for row in rows:
        numbers = [row[what] for what in ("logprobs", "gradients") if row[what] is not None]
        apart = f"{max(numbers):.0e}" if numbers else ""
        reason = " ".join(row["reason"].split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
        half = ", its text half" if row["pictures"] else ""
        lines.append(f"| `{row['model_type']}`{half} | {row['status']} | {reason} | {apart} |")
    return "\n".join(lines)


def inputs_reference() -> str:
    return str(importlib.import_module("inputs").inputs_reference())


def requests_reference() -> str:
    """The fields of each dialect in which agents ask."""
    made = []
    for _, alike in groupby(DIALECTS, key=lambda dialect: id(dialect.fields)):
        first, *others = alike
        paths = ", ".join(f"`POST base_url/{each.path}`" for each in (first, *others))
        made += [f"## {first.name}", "", paths, "", fields_table(first.fields)]
    return "\n".join(made)


REFERENCES = {
    "config": config_reference,
    "plugins": plugins_reference,
    "hooks": hooks_reference,
    "hooktypes": hooktypes_reference,
    "extensions": extensions_reference,
    "errors": errors_reference,
    "checks": partial(checks_reference, CHECKS),
    "algorithm": partial(checks_reference, ALGORITHM_CHECKS),
    "matrix": matrix_reference,
    "models": models_reference,
    "users": partial(public_reference, "users"),
    "authors": partial(public_reference, "authors"),
    "testers": partial(public_reference, "testers"),
    "wheels": partial(public_reference, "wheels"),
    "inputs": inputs_reference,
    "requests": requests_reference,
}
