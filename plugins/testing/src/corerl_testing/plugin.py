"""The pytest plugin of the conformance suites: `pytest_plugins = ["corerl_testing.plugin"]` in a conftest, or
`-p corerl_testing.plugin`. It only affects tests marked with `corerl_testing.marks.check`.

A check has one of these outcomes, which the report and the final table count:

passed, failed
blocked      a check that it builds on failed, so it was not run
unsupported  it failed, and the backend declares that it lacks the capability (if it passes, that is a failure)
expected     it failed, and the file of expected failures names it (if every check of the id passes, that is a failure)
not run      there is nothing to check here; the report says why
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from corerl.messages import did_you_mean, one_line
from corerl.plugin import Capability, Kind, Variant, load
from corerl.plugin.spec import RANKS_OF_VARIANTS
from corerl_testing.causes import Mismatch, usual
from corerl_testing.marks import LEVELS, MARK, Check, with_variants
from corerl_testing.outcomes import (
    FOUNDATION,
    SELECTED,
    SESSION,
    Outcome,
    Selected,
    Session,
    describe,
    gpus,
    parameters_of,
    report,
    summary,
)
from corerl_testing.pool import RankFailed

pytest.register_assert_rewrite("corerl_testing.compare", "corerl_testing.routing", "corerl_testing.spec_checks")
pytest_plugins = ["corerl_testing.fixtures"]

# What the base class brings, and where a check runs: a failure says nothing of these.
INHERITED = {
    Capability.SNAPSHOTS,
    Capability.SAVE_BACKGROUND,
    Capability.RESHARD,
    Capability.SLEEP,
    Capability.CPU,
    Capability.MULTI_RANK,
}
SUITES = ("corerl_testing.suite", "corerl_testing.algorithm_suite")
DEFAULT_LEVEL = 2


# ---- options ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("corerl", "conformance of CoreRL backends and algorithms")
    group.addoption("--corerl-backend", metavar="NAME", default="", help="name, distribution:name or package.mod:SPEC")
    group.addoption("--corerl-algorithm", metavar="NAME", default="", help="likewise")
    group.addoption(
        "--corerl-override",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="of the config: settings for the algorithm, or the backend's own options",
    )
    group.addoption(
        "--corerl-check", metavar="ID", action="append", default=[], help="only this one, with all that it builds on"
    )
    group.addoption("--corerl-level", metavar="N", type=int, help="run checks of levels 0 to N (default: 2)")
    group.addoption(
        "--corerl-expected-failures", metavar="FILE", default="", help="a TOML file, a line each: C20 = 'reason, link'"
    )
    group.addoption("--corerl-report", metavar="FILE", default="", help="write what each check found as JSON")
    parser.addini("corerl_level", "checks of levels 0 to this one are run", default=str(DEFAULT_LEVEL))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(check): a check of a conformance suite of CoreRL")
    given = config.getoption("--corerl-level")
    level = int(config.getini("corerl_level")) if given is None else given
    if level not in LEVELS:
        raise pytest.UsageError(f"--corerl-level is {level}, expected one of {', '.join(map(str, LEVELS))}")
    skipped = {}
    if level >= 3 and not gpus():
        if given == 3:
            raise pytest.UsageError(NO_GPU)
        skipped[3] = "there is no GPU"
    if file := config.getoption("--corerl-report"):
        _require_writable(Path(file))
    file = config.getoption("--corerl-expected-failures")
    config.stash[SESSION] = Session(level=level, skipped_levels=skipped, expected=_expected(file) if file else {})


NO_GPU = "level 3 needs a GPU, but torch sees none here; use --level 2, or 4 to skip level 3"


def _require_writable(file: Path) -> None:
    """That a report cannot be written is reported before the checks take minutes."""
    if not file.parent.is_dir():
        raise pytest.UsageError(f"cannot write the report {file}: there is no directory {file.parent}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise pytest.UsageError(f"cannot write the report {file}: it is a directory, or not yours to write")


def _expected(file: str) -> dict[str, str]:
    try:
        table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not UTF-8, or not TOML
        raise pytest.UsageError(f"cannot read the expected failures {file}: {error}") from error
    for id_, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise pytest.UsageError(f"{file}: {id_} = {reason!r}, expected a reason as text")
    return table


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        line
        for kind in (Kind.BACKENDS, Kind.ALGORITHMS)
        if (name := config.getoption(f"--corerl-{kind.noun}"))
        for line in describe(kind, name, config.stash[SESSION], variants=not config.getoption("--corerl-override"))
    ]


# ---- selection and order of checks -----------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        return
    check: Check = mark.args[0]
    if "world_size" in metafunc.fixturenames:
        ranks = {*check.ranks, *(RANKS_OF_VARIANTS if check.variants is not None else ())}
        metafunc.parametrize("world_size", sorted(ranks), ids="on {} rank(s)".format)
    name, options = (metafunc.config.getoption(f"--corerl-{option}") for option in ("backend", "override"))
    if name and not options and check.variants is not None:  # a file that names its backend has a fixture of them
        metafunc.parametrize("backend_variant", with_variants(name), scope="session")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect checks above the level, and run the others of a file, or of the whole suite, after the checks that they
    build on. Other tests keep their places."""
    own = config.stash[SESSION]
    known: set[str] = set()
    kept, dropped = [], []
    places: dict[str, list[int]] = {}
    only = _asked(config.getoption("--corerl-check"), items)
    for item in items:
        mark = item.get_closest_marker(MARK)
        if mark is None:
            kept.append(item)
            continue
        parameters = parameters_of(item)
        if not _fits(mark.args[0], parameters):
            continue
        found = _select(item, mark.args[0], parameters)
        known.add(found.check.id)
        out = found.level > own.level or found.level in own.skipped_levels
        if out or (only and found.check.id not in only):
            dropped.append(item)
            continue
        item.stash[SELECTED] = found
        places.setdefault(_scope(item), []).append(len(kept))
        kept.append(item)
    reached = {item.stash[SELECTED].check.id for item in kept if SELECTED in item.stash}
    if absent := [id_ for id_ in config.getoption("--corerl-check") if id_ not in reached]:
        levels = f"of levels 0 to {own.level}" + "".join(f", not {skipped}" for skipped in own.skipped_levels)
        raise pytest.UsageError(f"{absent[0]} is not among the checks {levels}, which are run; ask for another level")
    if unknown := sorted(own.expected.keys() - known) if known else ():
        raise pytest.UsageError(
            f"the expected failures name checks that do not exist: {', '.join(unknown)}; remove them from "
            f"{config.getoption('--corerl-expected-failures')}"
        )
    for where in places.values():
        ordered = _in_order([kept[place] for place in where])
        for place, item in zip(where, ordered, strict=True):
            kept[place] = item
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def _asked(ids: Sequence[str], items: Sequence[pytest.Item]) -> set[str]:
    """The ids of these checks and of all that they build on; empty for all checks."""
    checks = [mark.args[0] for item in items if (mark := item.get_closest_marker(MARK)) is not None]
    builds_on: dict[str, set[str]] = {check.id: set() for check in checks}
    for check in checks:
        builds_on[check.id].update(check.builds_on)
    for id_ in ids:
        if id_ not in builds_on:
            raise pytest.UsageError(f"there is no check {id_!r}{did_you_mean(id_, builds_on)}")
    found, left = set[str](), list(ids)
    while left:
        if (id_ := left.pop()) not in found:
            found.add(id_)
            left += builds_on.get(id_, ())
    return found


def _fits(check: Check, parameters: Mapping[str, Any]) -> bool:
    """Whether the check is run with these: with the backend's defaults on its own numbers of ranks, with a variant on
    the variant's, and then with one of its sets of parameters."""
    variant: Variant | None = parameters.get("backend_variant")
    if variant is None:
        return parameters.get("world_size", 0) in (0, *check.ranks)
    if check.variants is None:
        return False
    wanted = {**check.variants, "world_size": variant.ranks}
    return all(parameters[name] == value for name, value in wanted.items())


def _select(item: pytest.Item, check: Check, parameters: Mapping[str, Any]) -> Selected:
    callspec = getattr(item, "callspec", None)
    world_size = parameters.get("world_size", 0)
    variant: Variant | None = parameters.get("backend_variant")
    level, needs = check.level_at(world_size), list(check.needs)
    if world_size and level in (1, 2, 4):  # checks without ranks choose a device themselves
        needs.append(Capability.CPU)
    if world_size > 1:
        needs.append(Capability.MULTI_RANK)
    if str(parameters.get("kind")).startswith("qwen3-moe"):
        needs.append(Capability.MOE)
    return Selected(
        check=check,
        level=level,
        world_size=world_size,
        parameters=callspec.id if callspec else "",
        variant="" if variant is None else variant.name,
        needs=tuple(dict.fromkeys(needs)),
    )


def _scope(item: pytest.Item) -> str:
    module = getattr(item, "module", None)
    name = getattr(module, "__name__", "")
    return next((suite for suite in SUITES if name.startswith(suite)), str(item.path))


def _in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    builds_on: dict[str, set[str]] = {}
    for item in items:
        found = item.stash[SELECTED]
        builds_on.setdefault(found.check.id, set()).update(found.check.builds_on)
    depths: dict[str, int] = {}

    def depth(id_: str) -> int:
        if id_ not in depths:
            depths[id_] = 0  # so that a cycle ends
            depths[id_] = 1 + max((depth(each) for each in builds_on.get(id_, ())), default=-1)
        return depths[id_]

    def place(item: pytest.Item) -> tuple[int, str, bool, int]:
        found = item.stash[SELECTED]
        first = not found.variant or found.check.id == FOUNDATION
        return found.level, found.variant, not first, depth(found.check.id)

    return sorted(items, key=place)


# ---- each check ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _corerl_check(request: pytest.FixtureRequest) -> None:
    """Before a check's setup: skip it if it is blocked, and note the needed capabilities that a backend lacks."""
    found = request.node.stash.get(SELECTED, None)
    if found is None:
        return
    found.plugin = request.getfixturevalue(f"{found.check.of.noun}_name")
    session = request.config.stash[SESSION]
    found.blocked_by = session.blocked_by(found)
    if found.blocked_by:
        pytest.skip(f"blocked by {found.blocked_by}")
    if found.needs:
        loaded = load(found.check.of, found.plugin)
        supports = {capability: loaded.spec.support(capability) for capability in found.needs}
        found.unsupported = {str(each): support.reason for each, support in supports.items() if not support.full}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = item.stash.get(SELECTED, None)
    if found is None:
        return report
    session = item.config.stash[SESSION]
    failed = report.failed
    lacks = ", ".join(f"{capability!r} ({reason})" for capability, reason in found.unsupported.items())
    outcome, reason = "", ""
    if report.skipped:
        outcome = "blocked" if found.blocked_by else "not run"
        reason = _skip_reason(report)
    elif failed and report.when != "teardown" and found.unsupported:
        outcome, reason = "unsupported", f"{found.plugin} declares that it lacks {lacks}"
    elif report.when == "call" and report.passed and found.unsupported:
        outcome, reason = "failed", f"[XPASS(strict)] {found.plugin} does not declare {lacks}, but the check passes"
        report.outcome, report.longrepr = "failed", f"{reason}; declare the capability as FULL"
    elif failed and found.check.id in session.expected:
        outcome, reason = "expected", session.expected[found.check.id]
    elif failed:
        outcome, reason = "failed", one_line(call.excinfo.value) if call.excinfo else ""
        if compared(call.excinfo) and item.function.__module__.startswith(SUITES):  # type: ignore[attr-defined]
            causes = usual(found.check.id) + undeclared(found.needs)
            reason += causes
            report.sections.append(("what usually causes this", causes.removeprefix("; ")))
    elif report.when == "call":
        outcome = "passed"
    if outcome in ("unsupported", "expected"):
        report.outcome = "skipped"
        report.wasxfail = reason  # read by pytest itself
    if outcome in ("blocked", "failed", "expected"):
        session.failed.setdefault((found.plugin, found.check.id), set()).add(found.where)
        if found.blocked_by:
            session.root_of[found.plugin, found.check.id, found.where] = found.blocked_by
    if outcome:
        report.corerl_outcome = outcome  # type: ignore[attr-defined]
        line = Outcome(
            id=found.check.id,
            name=getattr(item, "originalname", item.name),
            parameters=found.parameters,
            level=found.level,
            ranks=found.world_size,
            variant=found.variant,
            needs=[str(capability) for capability in found.needs],
            outcome=outcome,
            reason=reason,
            blocked_by=found.blocked_by,
            seconds=round(call.duration, 3),
        )
        session.outcomes.append(((found.check.of, found.plugin), line))
    return report


def undeclared(needs: Sequence[Capability]) -> str:
    """The clause for a check of what the spec does not declare as lacking, though the backend may lack it."""
    asked = ", ".join(str(each) for each in needs if each not in INHERITED)
    return f"; if it lacks {asked}, declare that in the spec's capabilities" if asked else ""


def compared(failure: pytest.ExceptionInfo[BaseException] | None) -> bool:
    """Whether the check failed by a comparison, here or in a rank, that does not say where to look: any other error
    names its cause itself."""
    text = "" if failure is None else str(failure.value)
    return failure is not None and (
        (failure.errisinstance((AssertionError, pytest.fail.Exception)) and not failure.errisinstance(Mismatch))
        or (failure.errisinstance(RankFailed) and "AssertionError" in text)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    match getattr(report, "corerl_outcome", ""):
        case "blocked":
            return "blocked", "b", "BLOCKED"
        case "unsupported":
            return "unsupported", "u", "UNSUPPORTED"
        case "expected":
            return "expected to fail", "x", "EXPECTED"
    return None


def _skip_reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    return str(where[2]).removeprefix("Skipped: ") if isinstance(where, tuple) else str(where)


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    own = config.stash[SESSION]
    if not own.outcomes:
        return
    ran = {line.id: False for _, line in own.outcomes}
    for _, line in own.outcomes:
        ran[line.id] |= line.outcome != "passed"
    own.passed_against_expectation = [id_ for id_ in own.expected if ran.get(id_) is False]
    if own.passed_against_expectation and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if file := config.getoption("--corerl-report"):
        reports = [report(kind, name, own) for kind, name in dict.fromkeys(plugin for plugin, _ in own.outcomes)]
        Path(file).write_text(as_text(reports[0]) if len(reports) == 1 else json.dumps(reports))


def as_text(report: Mapping[str, Any]) -> str:
    """The report as JSON with a line for each entry, and one for each check."""
    checks = ",\n".join(f"  {json.dumps(each)}" for each in report["checks"])
    rest = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in report.items() if key != "checks")
    return f'{{\n{rest} "checks": [\n{checks}\n ]\n}}\n'


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    own = config.stash[SESSION]
    named = config.getoption("--corerl-backend") or config.getoption("--corerl-algorithm")
    if not named or not own.outcomes:
        return
    terminalreporter.section("conformance")
    for line in summary(own):
        terminalreporter.line(line)
