"""A run of fakes whose groups are changed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, evolve

from corerl.plan import Plan
from corerl_elastic import sizes
from corerl_elastic.changing import resize
from corerl_elastic.config import ElasticOptions
from corerl_elastic.extension import Elastic
from corerl_testing import make_plan
from tests.driver import groups
from tests.driver.fakes import told
from tests.driver.saved import config_in


class Case(groups.Case):
    """A run with the extension, which waits for no spare machine."""

    def change(self, *overrides: str) -> list[str]:
        """What is told of each group, without the seconds that it took."""
        self.log.clear()
        self.groups.changed, self.groups.save = set(), self.save
        return [line.rpartition(",")[0] for line in resize(self.groups, overrides)]

    def save(self) -> Path:
        self.log.append("save")
        return Path("checkpoint")

    def fails(self, error: type[Exception], *overrides: str) -> str:
        with pytest.raises(error) as caught:
            self.change(*overrides)
        return str(caught.value)

    def replace_lost(self, *, ranks: bool = True) -> list[str]:
        """What is told where processes have ended: all ranks, or engines alone."""
        before = len(told(self.ears))
        self.groups.failed("it has died", ranks=ranks)
        return told(self.ears)[before:]


def make(tmp_path: Path, **given: Any) -> Case:
    return Case(**asdict(groups.make(tmp_path, extensions=extended(tmp_path), **given), recurse=False))


def extended(tmp_path: Path) -> list[tuple[str, object]]:
    return [("elastic", Elastic(options=ElasticOptions(spare_timeout=0.0), run_dir=str(tmp_path / "run")))]


def recorded_ranks(case: Case) -> dict[str, int]:
    written = tomllib.loads((case.groups.plan.start.run_dir / "config.toml").read_text())
    return {name: written["roles"][name]["ranks"] for name in case.ranks}


def on_gpus(plan: Plan, transport: str, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The plan, and those of other sizes, as if for GPUs with ranks and engines on them."""

    def told(found: Plan) -> Plan:
        places = found.processes.placement.places
        beside = tuple(places["actor"].index(place) for place in places["engines"] if place in places["actor"])
        ranks = beside if len(beside) == len(places["engines"]) else ()
        return evolve(
            found, processes=evolve(found.processes, device="cuda", colocated_ranks=ranks, transport=transport)
        )

    resized = sizes.resized
    monkeypatch.setattr(sizes, "resized", lambda plan, overrides: told(resized(plan, overrides)))
    return told(plan)


def wide(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 4, replicas: int = 2, **given: Any
) -> Case:
    roles = {"actor": {"ranks": ranks}}
    rollout = {"engine": "fake", "prompts": 8, "samples": 4, "replicas": replicas}
    tables: dict[str, Any] = {"backend": {"name": "fsdp"}, "roles": roles, "rollout": rollout}
    (tmp_path / "run").mkdir()
    plan = make_plan(config_in(tmp_path / "run", **tables))
    return make(tmp_path, plan=on_gpus(plan, transport, monkeypatch), **given)
