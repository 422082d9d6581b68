"""An extension reads a plan before anything starts, and sets, notes or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config.schema import Config, ExtensionChoice
from corerl.errors import ConfigError, ContractError, DataError, HookFailed
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.plugin.observers import load_observers
from tests.driver.saved import config_in
from tests.plan.planners import SEEN

MODULE = "tests.plan.planners:"


@pytest.fixture(autouse=True)
def unseen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def asking(tmp_path: Path, **answers: dict[str, Any]) -> Config:
    """A config whose extensions answer so, by their names."""
    choices = [ExtensionChoice(name=f"{MODULE}{name}", options=each) for name, each in answers.items()]
    return evolve(config_in(tmp_path / "run"), extensions=tuple(choices))


def planned(tmp_path: Path, **answers: dict[str, Any]) -> Plan:
    return make_plan(asking(tmp_path, **answers))


def message(kind: type[Exception], tmp_path: Path, **answers: dict[str, Any]) -> str:
    with pytest.raises(kind) as caught:
        planned(tmp_path, **answers)
    assert type(caught.value) is kind
    return str(caught.value).replace(MODULE, "")


def test_remarks_on_a_plan_go_with_it_and_reasons_stay(tmp_path: Path) -> None:
    plan = planned(tmp_path, FIRST={"does": "counts"}, SECOND={"settings": {"run.steps": 7}, "notices": ["as asked"]})
    assert plan.notices == ("as asked", "7 steps")


def test_problems_of_all_extensions_end_the_planning_together(tmp_path: Path) -> None:
    found = message(
        ConfigError, tmp_path, FIRST={"problems": ["run.steps: too many"]}, SECOND={"problems": ["run.x: y"]}
    )
    assert found == "run.steps: too many\nrun.x: y"


def test_problems_of_a_replaced_plan_are_dropped(tmp_path: Path) -> None:
    found = message(ConfigError, tmp_path, FIRST={"settings": {"run.steps": 5}, "problems": ["run.steps: no"]})
    assert found == "run.steps: no\nrun.steps: set to 5 by extension:FIRST"
    assert [each.config.run.steps for each in SEEN][-1] == 5


@pytest.mark.parametrize(
    ("key", "value", "wanted", "last"),
    [
        ("train.mini_batches", 0, "train.mini_batches: ", "train.mini_batches: set to 0 by extension:FIRST"),
        ("train.nothing", [1], "train.nothing: unknown key", "train.nothing: set to [1] by extension:FIRST"),
        ("train.recompute", "full", "it keeps all activations", 'train.recompute: set to "full" by extension:FIRST'),
    ],
)
def test_settings_that_cannot_be_are_told_with_who_set_them(
    tmp_path: Path, key: str, value: Any, wanted: str, last: str
) -> None:
    lines = message(ConfigError, tmp_path, FIRST={"settings": {key: value}}).splitlines()
    assert wanted in lines[0] and lines[1:] == [last]


def test_an_extension_that_changes_its_mind_ends_the_planning(tmp_path: Path) -> None:
    found = message(ConfigError, tmp_path, FIRST={"does": "changes its mind"})
    assert found.startswith("train.mini_batches: extension:FIRST sets it to 2, and extension:FIRST to 3; ")


def test_an_error_of_an_extension_has_its_name(tmp_path: Path) -> None:
    assert message(HookFailed, tmp_path, FIRST={"does": "raises"}) == (
        "extension:FIRST: plan_ready failed: KeyError: 'missing'"
    )
    assert message(DataError, tmp_path, FIRST={"does": "refuses"}) == "data.source: not on Sundays; use another"
    assert message(ContractError, tmp_path, FIRST={"does": "returns a dict"}) == (
        "extension:FIRST: plan_ready returned dict, expected PlanAnswer or None"
    )


def test_a_spec_says_whether_its_extension_plans(tmp_path: Path) -> None:
    unasked = asking(tmp_path, UNASKED={})
    make_plan(unasked)
    assert SEEN == []
    with pytest.raises(
        ContractError, match=r"^extension:\S+:UNASKED implements plan_ready, which is not called; set plans="
    ):
        load_observers(unasked.extensions, str(tmp_path))
