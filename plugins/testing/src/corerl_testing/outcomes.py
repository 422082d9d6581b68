"""The selected checks, their outcomes, and the final report and summary."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from attrs import asdict, define, field, frozen

from corerl.errors import CorerlError
from corerl.plugin import BackendSpec, Capability, Kind, load
from corerl.plugin.registry import Loaded
from corerl_testing.marks import MARK, Check

SEED = 0
# What is wrong with the training of a variant would fail all of its other checks too.
FOUNDATION = "C41"
SETS = ("backend_name", "backend_variant", "world_size")  # parameters that no other value stands for
OUTCOMES = ("passed", "failed", "blocked", "unsupported", "expected", "not run")


@define
class Selected:
    """A check with its parameters."""

    check: Check
    level: int
    world_size: int  # 0 if the check does not take one
    parameters: str
    variant: str  # its name; "" with the backend's defaults
    needs: tuple[Capability, ...]
    plugin: str = ""  # the backend's or algorithm's name, known once the check is set up
    unsupported: dict[str, str] = field(factory=dict)  # needed capability that the backend lacks -> reason
    blocked_by: str = ""

    @property
    def where(self) -> Where:
        return self.variant, self.world_size


Where = tuple[str, int]  # the name of a variant, or "", and a world size, or 0


@frozen(kw_only=True)
class Outcome:
    """A line of the report."""

    id: str
    name: str
    parameters: str
    level: int
    ranks: int
    variant: str  # its name; "" with the backend's defaults
    needs: list[str]
    outcome: str
    reason: str
    blocked_by: str
    seconds: float

    @property
    def label(self) -> str:
        return f"{self.id} with {self.variant!r}" if self.variant else self.id


SELECTED = pytest.StashKey[Selected]()
SESSION = pytest.StashKey["Session"]()


@define
class Session:
    """The state of one test run."""

    level: int
    skipped_levels: dict[int, str]
    expected: dict[str, str]  # id -> reason
    outcomes: list[tuple[tuple[Kind, str], Outcome]] = field(factory=list)  # (plugin, outcome)
    failed: dict[tuple[str, str], set[Where]] = field(factory=dict)  # (plugin, id) -> where it failed, or was blocked
    root_of: dict[tuple[str, str, Where], str] = field(factory=dict)  # where an id is blocked -> the failed id
    passed_against_expectation: list[str] = field(factory=list)

    def blocked_by(self, found: Selected) -> str:
        """The failed id that `found` builds on, directly or indirectly; "" if it builds on no failed one."""
        alone = [("", 0), ("", 1)]
        # On two ranks a check builds on itself on one rank, and with a variant on itself without it.
        own = alone if found.world_size > 1 else []
        places = [*alone, found.where] if found.world_size else [*alone, ("", 2)]
        if found.variant:
            own, places = [*own, ("", 2)], [*places, ("", 2)]
        builds_on = found.check.builds_on
        if found.variant and found.check.id != FOUNDATION:
            builds_on = (FOUNDATION, *builds_on)
        for id_, wheres in [*((id_, places) for id_ in builds_on), (found.check.id, own)]:
            for where in wheres:
                if where in self.failed.get((found.plugin, id_), ()):
                    return self.root_of.get((found.plugin, id_, where), id_)
        return ""


def repeated(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The checks that repeat another one with a further model, packing or value: all but one of each, with tied
    embeddings where there is a choice. Of what other checks build on, experts stay too."""
    kept: dict[tuple[Any, ...], pytest.Item] = {}
    rest = []
    for item in items:
        if (mark := item.get_closest_marker(MARK)) is None:
            continue
        parameters = dict(parameters_of(item))
        experts = mark.args[0].id == FOUNDATION and parameters.get("kind") == "qwen3-moe"
        own = {name: value for name, value in parameters.items() if name in SETS}
        key = (str(item.path), getattr(item, "originalname", item.name), repr(sorted(own.items(), key=str)), experts)
        if key not in kept:
            kept[key] = item
        elif parameters.get("kind") == "qwen3-tied" != parameters_of(kept[key]).get("kind"):
            rest.append(kept[key])
            kept[key] = item
        else:
            rest.append(item)
    return rest


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def loaded_plugin(kind: Kind, name: str) -> Loaded:
    try:
        return load(kind, name)
    except CorerlError as error:
        raise pytest.UsageError(error.message) from error


def describe(kind: Kind, name: str, session: Session, *, variants: bool) -> list[str]:
    import torch

    loaded = loaded_plugin(kind, name)
    about = [f"corerl {kind.noun}: {loaded}, {loaded.value}, API {'.'.join(map(str, loaded.spec.api))}"]
    if kind is not Kind.BACKENDS:
        return [*about, f"corerl torch: {torch.__version__}"]
    lacks = [str(capability) for capability in Capability if not loaded.spec.support(capability).full]
    also = loaded.spec.variants if variants and session.level >= 2 else ()
    named = ", ".join(f"{each.name!r} on {each.ranks} ranks" for each in also)
    levels = f"0 to {session.level}"
    if session.skipped_levels:
        levels += "".join(f" without {level} ({why})" for level, why in session.skipped_levels.items())
    return [
        *about,
        f"corerl capabilities: all but {', '.join(lacks)}" if lacks else "corerl capabilities: all",
        *([f"corerl variants: {named}"] if named else []),
        f"corerl levels: {levels}; torch {torch.__version__}, seed {SEED}",
    ]


def report(kind: Kind, name: str, session: Session) -> dict[str, Any]:
    """The report on one plugin, as plain data."""
    import torch

    import corerl

    loaded = load(kind, name)
    lines = [line for plugin, line in session.outcomes if plugin == (kind, name)]
    return {
        kind.noun: loaded.name,
        "distribution": loaded.distribution,
        "version": loaded.version,
        "value": loaded.value,
        "api": list(loaded.spec.api),
        **({"capabilities": _capabilities(loaded.spec)} if kind is Kind.BACKENDS else {}),
        "levels": [level for level in range(session.level + 1) if level not in session.skipped_levels],
        "corerl": corerl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if gpus() else "cpu",
        "seed": SEED,
        "summary": {outcome: sum(line.outcome == outcome for line in lines) for outcome in OUTCOMES},
        "passed_against_expectation": session.passed_against_expectation,
        "checks": [asdict(line) for line in lines],
    }


def _capabilities(spec: BackendSpec) -> dict[str, dict[str, str]]:
    supports = {capability: spec.support(capability) for capability in Capability}
    return {str(each): {"grade": str(support.grade), "reason": support.reason} for each, support in supports.items()}


def summary(session: Session) -> Iterator[str]:
    """The lines of the summary: a table by level, then details of single checks."""
    lines = [line for _, line in session.outcomes]
    yield "  ".join(["LEVEL", *(outcome.rjust(11) for outcome in OUTCOMES)])
    for level in range(session.level + 1):
        if level in session.skipped_levels:
            yield f"{level}      not run: {session.skipped_levels[level]}"
            continue
        counts = [sum(line.level == level and line.outcome == outcome for line in lines) for outcome in OUTCOMES]
        yield "  ".join([str(level).ljust(5), *(str(count or "-").rjust(11) for count in counts)])
    for outcome in ("not run", "expected", "failed"):
        seen: set[str] = set()
        first: dict[str, str] = {}  # reason -> the check that failed with it first
        for line in lines:
            if line.outcome == outcome and line.label not in seen:
                seen.add(line.label)
                at = first.setdefault(line.reason, line.label)
                reason = line.reason if at == line.label else f"as {at}"
                yield f"{line.label} {outcome}: {_sentence(line.name)}: {reason}"
    roots: dict[str, list[str]] = {}
    for line in lines:
        if line.outcome == "blocked" and line.blocked_by != line.id:  # not by itself on one rank
            roots.setdefault(line.blocked_by, []).append(line.id)
    for root, blocked in roots.items():
        yield f"{root} blocks: {', '.join(sorted(set(blocked)))}"
    for id_ in session.passed_against_expectation:
        yield f"{id_} passed, but the expected failures name it ({session.expected[id_]}); remove it there"


def _sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")
