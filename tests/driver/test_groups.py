"""What is done to a run's groups where processes have ended, and what extensions are asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import define, field

from corerl.driver.groups import RunGroups
from corerl.errors import InsufficientResources, WorkerDied
from corerl.messages import install_hint
from corerl.plugin.hooks import ProcessFailure
from tests.driver.fakes import told
from tests.driver.groups import make


@define(eq=False)
class Between:
    """An extension that asks for a checkpoint, and says that it has changed a group."""

    checkpoints: list[Path] = field(factory=list)

    def between_steps(self, run: RunGroups) -> None:
        assert run.save is not None
        self.checkpoints.append(run.save())
        run.changed.add("engines")


def test_between_steps_extensions_may_save_and_say_what_has_changed(tmp_path: Path) -> None:
    extension = Between()
    groups = make(tmp_path, extensions=[("between", extension)]).groups
    assert groups.between_steps(lambda: Path("checkpoint")) == {"engines"}
    assert extension.checkpoints == [Path("checkpoint")] and groups.save is None


@define(eq=False)
class Hearing:
    """An extension that notes failures."""

    heard: list[ProcessFailure] = field(factory=list)

    def ranks_failed(self, run: RunGroups, failure: ProcessFailure) -> None:
        self.heard.append(failure)


def test_a_lost_machine_without_replacement_ends_the_run(tmp_path: Path) -> None:
    silent = Hearing()
    case = make(tmp_path, extensions=[("silent", silent)])
    case.groups.failed("a rank has died", ranks=True)  # on a machine that is there
    assert told(case.ears) == []
    case.pool.gone = {0}
    with pytest.raises(InsufficientResources) as caught:
        case.groups.failed("a rank has died", ranks=True)
    assert caught.value.message == (
        "processes without a place: 1 of actor, 1 of critic, 1 of engines; to go on with spare machines, or in smaller "
        f"groups: {install_hint('elastic')}"
    )
    assert silent.heard == [
        ProcessFailure(message="a rank has died", ranks=True, lost=lost)
        for lost in ({}, {"actor": 1, "critic": 1, "engines": 1})
    ]


def test_ranks_of_a_lost_machine_end_before_engines_are_replaced(tmp_path: Path) -> None:
    case = make(tmp_path, roles={"actor": {"ranks": 2}, "critic": {"ranks": 1}})
    ends: list[str] = []
    for name, ranks in case.ranks.items():
        nodes = [slot.node for slot in case.pool.slots[name]]
        ranks.processes = SimpleNamespace(nodes=nodes, kill=lambda name=name: ends.append(name))
    case.groups.failed("engine-0 has died", ranks=False)
    case.pool.gone = {1}
    with pytest.raises(WorkerDied, match="^actor rank 1: its machine is gone$"):
        case.groups.failed("engine-0 has died", ranks=False)
    assert ends == ["actor"] and case.starts() == {"actor": 2, "critic": 1}
