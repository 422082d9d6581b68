"""The suite as a whole: which checks there are, and what they build on."""

from __future__ import annotations

import inspect
from pathlib import Path

from corerl.testing import suite
from corerl.testing.marks import LEVELS, Check, check_of
from corerl.testing.suite import CHECKS


def checks() -> dict[str, Check]:
    found = {name: check_of(function) for name, function in CHECKS.items()}
    return {name: check for name, check in found.items() if check is not None}


def test_every_announced_check_exists_and_says_in_its_name_what_holds() -> None:
    ids = {check.id for check in checks().values()}
    assert ids == {f"C{number:02}" for number in range(1, max(int(id_[1:]) for id_ in ids) + 1)}
    assert all(len(name.removeprefix("test_").split("_")) >= 4 for name in checks())


def test_every_module_with_checks_is_part_of_the_suite() -> None:
    files = Path(suite.__path__[0]).glob("test_*.py")
    assert {path.stem for path in files} == {module.__name__.rpartition(".")[2] for module in suite.MODULES}


def test_checks_build_on_checks_that_exist_of_no_higher_level_and_in_no_circle() -> None:
    levels: dict[str, int] = {}
    builds_on: dict[str, set[str]] = {}
    for check in checks().values():
        levels[check.id] = min(check.level, levels.get(check.id, max(LEVELS)))
        builds_on.setdefault(check.id, set()).update(check.builds_on)
    assert {id_ for each in builds_on.values() for id_ in each} <= levels.keys()
    done: set[str] = set()
    while left := levels.keys() - done:
        ready = {id_ for id_ in left if builds_on[id_] <= done}
        assert ready, f"in a circle: {sorted(left)}"
        done |= ready


def test_checks_take_only_what_the_plugin_gives() -> None:
    given = {"subject", "loaded", "runs", "backend_name", "options", "tmp_path", "world_size", "seats", "wrapped"}
    for name, function in CHECKS.items():
        parameters = set(inspect.signature(function).parameters)
        own = {
            argument
            for mark in getattr(function, "pytestmark", ())
            if mark.name == "parametrize"
            for argument in (mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0])
        }
        assert parameters - own <= given, name
