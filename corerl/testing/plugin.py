"""The pytest plugin of the conformance suite: `pytest_plugins = ["corerl.testing.plugin"]` in a conftest, or
`-p corerl.testing.plugin`. It touches nothing but tests that are marked with `corerl.testing.marks.check`.

A check ends in one of these, which the report and the table at the end count:

passed, failed
blocked      something that it builds on failed: it was not run, and says nothing
unsupported  it failed, and the backend declares that it lacks the capability (if it passes, that is a failure)
expected     it failed, and the file of expected failures names it (if every check of the id passes, that is a failure)
not run      it has nothing to look at here; the reason is told
"""

from __future__ import annotations

import json
import platform
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import asdict, define, field, frozen

from corerl.errors import CorerlError, Unsupported
from corerl.plugin.capabilities import FULL, Capability, Grade, Support
from corerl.plugin.registry import Kind, Loaded, load
from corerl.testing.marks import LEVELS, MARK, Check

pytest.register_assert_rewrite("corerl.testing.compare", "corerl.testing.routing")

from corerl.testing.pool import OneRank, RankPool, Ranks  # noqa: E402

if TYPE_CHECKING:
    from corerl.testing.subject import Runs, Subject

SUITE = "corerl.testing.suite"
DEFAULT_LEVEL = 2
SEED = 0
OUTCOMES = ("passed", "failed", "blocked", "unsupported", "expected", "not run")


# ---- what is known of a check that was selected, and of how it ended -------------------------------------------------


@define
class Selected:
    """A check with its parameters."""

    check: Check
    level: int
    world_size: int  # 0 where it has no say
    parameters: str
    needs: tuple[Capability, ...]
    backend: str = ""  # known once it is set up
    unsupported: dict[str, str] = field(factory=dict)  # capability that it needs and the backend lacks -> reason
    blocked_by: str = ""


@frozen(kw_only=True)
class Outcome:
    """A line of the report."""

    id: str
    name: str
    parameters: str
    level: int
    ranks: int
    needs: list[str]
    outcome: str
    reason: str
    blocked_by: str
    seconds: float


SELECTED = pytest.StashKey[Selected]()
SESSION = pytest.StashKey["Session"]()


@define
class Session:
    """Of one test run."""

    level: int
    skipped_levels: dict[int, str]
    expected: dict[str, str]  # id -> reason
    outcomes: list[tuple[str, Outcome]] = field(factory=list)  # with the backend
    failed: dict[tuple[str, str], set[int]] = field(factory=dict)  # (backend, id) -> world sizes, 0 for none
    root_of: dict[tuple[str, str, int], str] = field(factory=dict)  # of what was blocked, the id that failed
    passed_against_expectation: list[str] = field(factory=list)

    def blocked_by(self, found: Selected) -> str:
        """The id that failed and that `found` builds on, directly or not; "" where there is none."""
        for id_ in found.check.builds_on:
            for world_size in sorted({0, 1, found.world_size} if found.world_size else {0, 1, 2}):
                if world_size in self.failed.get((found.backend, id_), ()):
                    return self.root_of.get((found.backend, id_, world_size), id_)
        # On two ranks a check builds on itself on one.
        if found.world_size > 1 and 1 in self.failed.get((found.backend, found.check.id), ()):
            return self.root_of.get((found.backend, found.check.id, 1), found.check.id)
        return ""


# ---- options ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("corerl", "conformance of CoreRL backends")
    group.addoption("--corerl-backend", metavar="NAME", default="", help="name, distribution:name or package.mod:SPEC")
    group.addoption("--corerl-level", metavar="N", type=int, help="run checks of levels 0 to N (default: 2)")
    group.addoption(
        "--corerl-expected-failures", metavar="FILE", default="", help="a TOML file, a line each: C20 = 'reason, link'"
    )
    group.addoption("--corerl-report", metavar="FILE", default="", help="write what each check found as JSON")
    parser.addini("corerl_level", "checks of levels 0 to this one are run", default=str(DEFAULT_LEVEL))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(check): a check of the conformance suite of CoreRL backends")
    given = config.getoption("--corerl-level")
    level = int(config.getini("corerl_level")) if given is None else given
    if level not in LEVELS:
        raise pytest.UsageError(f"--corerl-level is {level}, expected one of {', '.join(map(str, LEVELS))}")
    skipped = {}
    if level >= 3 and not _gpus():
        if given == 3:
            raise pytest.UsageError(NO_GPU)
        skipped[3] = "no GPU here"
    file = config.getoption("--corerl-expected-failures")
    config.stash[SESSION] = Session(level=level, skipped_levels=skipped, expected=_expected(file) if file else {})


NO_GPU = "level 3 needs a GPU, and torch sees none here; take --level 2, or 4 to leave level 3 out"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _expected(file: str) -> dict[str, str]:
    try:
        table = tomllib.loads(Path(file).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise pytest.UsageError(f"cannot read the expected failures {file}: {error}") from error
    for id_, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise pytest.UsageError(f"{file}: {id_} = {reason!r}, expected a reason as text")
    return table


def pytest_report_header(config: pytest.Config) -> list[str]:
    name = config.getoption("--corerl-backend")
    return describe(name, config.stash[SESSION]) if name else []


def describe(name: str, session: Session) -> list[str]:
    import torch

    loaded = _loaded(name)
    lacks = [str(capability) for capability in Capability if _support(loaded, capability).grade is not Grade.FULL]
    levels = f"0 to {session.level}"
    if session.skipped_levels:
        levels += "".join(f" without {level} ({why})" for level, why in session.skipped_levels.items())
    return [
        f"corerl backend: {loaded}, {loaded.value}, API {'.'.join(map(str, loaded.spec.api))}",
        f"corerl capabilities: all but {', '.join(lacks)}" if lacks else "corerl capabilities: all",
        f"corerl levels: {levels}; torch {torch.__version__}, seed {SEED}",
    ]


def _loaded(name: str) -> Loaded:
    try:
        return load(Kind.BACKENDS, name)
    except CorerlError as error:
        raise pytest.UsageError(error.message) from error


def _support(loaded: Loaded, capability: Capability) -> Support:
    support: Support = loaded.spec.capabilities.get(capability, FULL)
    return support


# ---- which checks, and in which order --------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is not None and "world_size" in metafunc.fixturenames:
        metafunc.parametrize("world_size", mark.args[0].ranks, ids="on {} rank(s)".format)


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Checks above the level go; the others of one file, or of the whole suite, run in the order of what they build
    on. Everything else stays where it is."""
    own = config.stash[SESSION]
    known: set[str] = set()
    kept, dropped = [], []
    places: dict[str, list[int]] = {}
    for item in items:
        mark = item.get_closest_marker(MARK)
        if mark is None:
            kept.append(item)
            continue
        found = _select(item, mark.args[0])
        known.add(found.check.id)
        if found.level > own.level or found.level in own.skipped_levels:
            dropped.append(item)
            continue
        item.stash[SELECTED] = found
        places.setdefault(_scope(item), []).append(len(kept))
        kept.append(item)
    if unknown := sorted(own.expected.keys() - known) if known else ():
        raise pytest.UsageError(
            f"expected failures name checks that do not exist: {', '.join(unknown)}; remove them from "
            f"{config.getoption('--corerl-expected-failures')}"
        )
    for where in places.values():
        ordered = _in_order([kept[place] for place in where])
        for place, item in zip(where, ordered, strict=True):
            kept[place] = item
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def _select(item: pytest.Item, check: Check) -> Selected:
    callspec = getattr(item, "callspec", None)
    parameters = dict(callspec.params) if callspec else {}
    world_size = parameters.get("world_size", 0)
    level, needs = check.level_at(world_size), list(check.needs)
    if level in (1, 2, 4):
        needs.append(Capability.CPU)
    if world_size > 1:
        needs.append(Capability.MULTI_RANK)
    if parameters.get("kind") == "qwen3-moe":
        needs.append(Capability.MOE)
    return Selected(
        check=check,
        level=level,
        world_size=world_size,
        parameters=callspec.id if callspec else "",
        needs=tuple(dict.fromkeys(needs)),
    )


def _scope(item: pytest.Item) -> str:
    module = getattr(item, "module", None)
    name = getattr(module, "__name__", "")
    return SUITE if name.startswith(SUITE) else str(item.path)


def _in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    builds_on: dict[str, set[str]] = {}
    for item in items:
        found = item.stash[SELECTED]
        builds_on.setdefault(found.check.id, set()).update(found.check.builds_on)
    depths: dict[str, int] = {}

    def depth(id_: str) -> int:
        if id_ not in depths:
            depths[id_] = 0  # so that a circle ends
            depths[id_] = 1 + max((depth(each) for each in builds_on.get(id_, ())), default=-1)
        return depths[id_]

    return sorted(items, key=lambda item: (item.stash[SELECTED].level, depth(item.stash[SELECTED].check.id)))


# ---- each check ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _corerl_check(request: pytest.FixtureRequest) -> None:
    """Before a check is set up: what its backend lacks of what it needs, and whether it is blocked."""
    found = request.node.stash.get(SELECTED, None)
    if found is None:
        return
    found.backend = request.getfixturevalue("backend_name")
    session = request.config.stash[SESSION]
    found.blocked_by = session.blocked_by(found)
    if found.blocked_by:
        pytest.skip(f"blocked by {found.blocked_by}")
    if found.needs:
        loaded = load(Kind.BACKENDS, found.backend)
        supports = {capability: _support(loaded, capability) for capability in found.needs}
        found.unsupported = {
            str(capability): support.reason
            for capability, support in supports.items()
            if support.grade is not Grade.FULL
        }


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
        outcome, reason = "unsupported", f"{found.backend} declares that it lacks {lacks}"
    elif report.when == "call" and report.passed and found.unsupported:
        outcome, reason = "failed", f"[XPASS(strict)] {found.backend} does not declare {lacks}, and it passes"
        report.outcome, report.longrepr = "failed", f"{reason}; declare what it can do as FULL"
    elif failed and found.check.id in session.expected:
        outcome, reason = "expected", session.expected[found.check.id]
    elif failed:
        outcome, reason = "failed", _first_line(call)
    elif report.when == "call":
        outcome = "passed"
    if outcome in ("unsupported", "expected"):
        report.outcome = "skipped"
        report.wasxfail = reason  # what pytest itself reads
    if outcome in ("blocked", "failed"):
        session.failed.setdefault((found.backend, found.check.id), set()).add(found.world_size)
        if found.blocked_by:
            session.root_of[found.backend, found.check.id, found.world_size] = found.blocked_by
    if outcome:
        report.corerl_outcome = outcome  # type: ignore[attr-defined]
        line = Outcome(
            id=found.check.id,
            name=getattr(item, "originalname", item.name),
            parameters=found.parameters,
            level=found.level,
            ranks=found.world_size,
            needs=[str(capability) for capability in found.needs],
            outcome=outcome,
            reason=reason,
            blocked_by=found.blocked_by,
            seconds=round(call.duration, 3),
        )
        session.outcomes.append((found.backend, line))
    return report


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


def _first_line(call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:
        return ""
    text = str(call.excinfo.value).strip()
    return f"{call.excinfo.typename}: {text.partition(chr(10))[0]}".removesuffix(": ")


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
        backends = list(dict.fromkeys(backend for backend, _ in own.outcomes))
        reports = [report(backend, own) for backend in backends]
        Path(file).write_text(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1) + "\n")


def report(backend: str, session: Session) -> dict[str, Any]:
    """All that is known of one backend, as plain data."""
    import torch

    import corerl

    loaded = load(Kind.BACKENDS, backend)
    lines = [line for name, line in session.outcomes if name == backend]
    return {
        "backend": loaded.name,
        "distribution": loaded.distribution,
        "version": loaded.version,
        "value": loaded.value,
        "api": list(loaded.spec.api),
        "capabilities": {
            str(capability): {"grade": str(support.grade), "reason": support.reason}
            for capability in Capability
            for support in [_support(loaded, capability)]
        },
        "levels": [level for level in range(session.level + 1) if level not in session.skipped_levels],
        "corerl": corerl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if _gpus() else "cpu",
        "seed": SEED,
        "summary": {outcome: sum(line.outcome == outcome for line in lines) for outcome in OUTCOMES},
        "passed_against_expectation": session.passed_against_expectation,
        "checks": [asdict(line) for line in lines],
    }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    own = config.stash[SESSION]
    if not config.getoption("--corerl-backend") or not own.outcomes:
        return
    terminalreporter.section("conformance")
    for line in summary(own):
        terminalreporter.line(line)


def summary(session: Session) -> Iterator[str]:
    """A table by level, and what is to be told of single checks."""
    lines = [line for _, line in session.outcomes]
    yield "  ".join(["LEVEL", *(outcome.rjust(11) for outcome in OUTCOMES)])
    for level in range(session.level + 1):
        if level in session.skipped_levels:
            yield f"{level}      not run: {session.skipped_levels[level]}"
            continue
        counts = [sum(line.level == level and line.outcome == outcome for line in lines) for outcome in OUTCOMES]
        yield "  ".join([str(level).ljust(5), *(str(count or "-").rjust(11) for count in counts)])
    for outcome in ("not run", "expected", "failed"):
        seen: dict[str, str] = {}
        for line in lines:
            if line.outcome == outcome:
                seen.setdefault(line.id, f"{line.id} {outcome}: {_sentence(line.name)}: {line.reason}")
        yield from seen.values()
    roots: dict[str, list[str]] = {}
    for line in lines:
        if line.outcome == "blocked" and line.blocked_by != line.id:  # and not on two ranks by itself on one
            roots.setdefault(line.blocked_by, []).append(line.id)
    for root, blocked in roots.items():
        yield f"{root} blocks: {', '.join(sorted(set(blocked)))}"
    for id_ in session.passed_against_expectation:
        yield f"{id_} passed, and the expected failures name it ({session.expected[id_]}): remove it there"


def _sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


# ---- what checks are given -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """Which backend: override it in the file that imports the suite, or give --corerl-backend."""
    name: str = request.config.getoption("--corerl-backend")
    if not name:
        raise pytest.UsageError("which backend? override the fixture backend_name, or give --corerl-backend NAME")
    return name


@pytest.fixture(scope="session")
def backend_options() -> Callable[[int], Mapping[str, Any]]:
    """The options that the backend is checked with, by level; override it where the defaults do not fit."""
    return lambda level: {}


@pytest.fixture
def options(request: pytest.FixtureRequest, backend_options: Callable[[int], Mapping[str, Any]]) -> Mapping[str, Any]:
    return backend_options(request.node.stash[SELECTED].level)


@pytest.fixture
def loaded(backend_name: str) -> Loaded:
    """The spec, and where it came from."""
    return load(Kind.BACKENDS, backend_name)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Two processes, for the whole test run."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def rank_sets(rank_pool: RankPool) -> Mapping[int, Ranks]:
    """World size -> where its ranks run."""
    return {1: OneRank(), rank_pool.world_size: rank_pool}


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> a directory that transformers wrote."""
    from corerl.testing.models import KINDS, write_tiny_model

    return {kind: write_tiny_model(kind, tmp_path_factory.mktemp("models") / kind) for kind in KINDS}


@pytest.fixture(scope="session")
def runs(rank_sets: Mapping[int, Ranks], model_directories: Mapping[str, Path]) -> Runs:
    """Trajectories that several checks look at, each trained once."""
    from corerl.testing.subject import Runs

    return Runs(rank_sets, model_directories)


@pytest.fixture(scope="session")
def gpu_runs(model_directories: Mapping[str, Path]) -> Iterator[Runs]:
    """One rank on a GPU, and two where there are as many."""
    from corerl.testing.subject import Runs

    pools = {size: RankPool(size, "cuda") for size in (1, 2) if size <= _gpus()}
    yield Runs(pools, model_directories)
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def _refusals() -> dict[str, str]:
    """Backend -> how it refused several ranks, so that it is asked once."""
    return {}


@pytest.fixture
def subject(
    request: pytest.FixtureRequest,
    backend_name: str,
    options: Mapping[str, Any],
    world_size: int,
    runs: Runs,
    tmp_path: Path,
    _refusals: dict[str, str],
) -> Subject:
    """The backend on `world_size` ranks, with whatever it declares that it lacks allowed.

    Several ranks are the exception: a backend that declares itself one process is asked to start on two, once, and its
    refusal is what each check on two ranks ends with.
    """
    from corerl.testing.subject import Subject

    found = request.node.stash[SELECTED]
    if found.level == 3:
        if world_size > _gpus():
            pytest.skip(f"needs {world_size} GPUs, {_gpus()} here")
        runs = request.getfixturevalue("gpu_runs")
    subject = Subject(
        backend=backend_name,
        world_size=world_size,
        device="cuda" if found.level == 3 else "cpu",
        runs=runs,
        directory=tmp_path,
        options=options,
        lifted=bool(found.unsupported),
    )
    if str(Capability.MULTI_RANK) in found.unsupported:
        if backend_name not in _refusals:
            _refusals[backend_name] = subject.refusal_of_two_ranks()
        if _refusals[backend_name]:
            raise Unsupported(_refusals[backend_name])
    return subject


@pytest.fixture(scope="module")
def seats() -> Iterator[Mapping[str, Any]]:
    """Ray, started by the first check that asks; these come last, so that no other test finds it running."""
    from corerl.testing import groups

    with groups.seats() as seats:
        yield seats


@pytest.fixture(scope="module")
def _wrapped() -> dict[tuple[str, int], Any]:
    return {}


@pytest.fixture
def wrapped(subject: Subject, seats: Mapping[str, Any], _wrapped: dict[tuple[str, int], Any]) -> Any:
    """A group with three wrappers around its backend, which has run and lost a rank; once for several checks."""
    from corerl.testing import groups

    key = (subject.backend, subject.world_size)
    if key not in _wrapped:
        setup = subject.setup("qwen3")
        _wrapped[key] = groups.wrapped(setup, subject.world_size, seats["actor"], subject.directory / "wrapped")
    return _wrapped[key]
