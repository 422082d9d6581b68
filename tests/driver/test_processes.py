"""What the processes of a run are given, and how they start; that they work and end is tested in tests/end_to_end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from attrs import evolve

from corerl.calls import Future
from corerl.cluster.heartbeat import Pending, Watching
from corerl.cluster.placement import Bundle, Gpu, Slot
from corerl.cluster.process import CallResult
from corerl.driver import processes as driver
from corerl.driver.processes import emit_call, load_all, make_fleet
from corerl.errors import CorerlError, PluginIncompatible, SaveFailed, WorkerDied
from corerl.observability.timing import Spans
from corerl.plan.make import make_plan
from corerl.plugin.events import CallFinished, Span
from tests.driver.fakes import Ears, progress, told
from tests.driver.saved import config_in


def test_engines_have_the_actors_precision_and_their_slots_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RayGroup", lambda *_, **__: None)
    bundles = tuple(Bundle(group=None, index=0, gpu=Gpu(gpu, str(gpu))) for gpu in (4, 5))
    slot = Slot(bundles, cpus=1.0, gpus=1.0)  # never sat on
    for backend, precision in (("plain", "float32"), ("fsdp", "bfloat16")):
        train = {"precision": precision}
        plan = make_plan(config_in(tmp_path / "run", backend={"name": backend}, roles={"actor": {"train": train}}))
        assert plan.processes.engine is not None
        fleet = make_fleet(plan.processes.engine, [slot], Watching(), NO_LOOP, plan.rollout.settings, Spans())
        (engine,) = fleet.assignments
        assert (engine.context.precision, engine.context.devices) == (precision, ("4", "5"))
        assert engine.context.run_dir == str(tmp_path / "run")


NO_LOOP: Any = None  # nothing is sampled


def test_a_finished_call_is_reported_with_both_sides_times() -> None:
    hears = Ears()
    pending = Pending("train at optimizer step 2", 0, {}, (), asked=1.0)
    spans = (Span(name="optimizer", started=3.0, ended=4.0),)
    waits = (Span(name="all_reduce", started=3.5, ended=3.75),)
    done = CallResult(value="much", started=2.0, ended=4.0, method="train", lane=1, spans=spans, waits=waits)
    emit_call(progress(hears), "actor rank 0", pending, done)
    whole = CallFinished(
        process="actor rank 0", verb="train", call="train at optimizer step 2", asked=1.0, started=2.0, ended=4.0,
        lane=1, spans=spans, waits=waits,
    )  # fmt: skip
    emit_call(progress(hears), "actor rank 0", pending, evolve(done, value=None, error=SaveFailed("disk full")))
    assert hears.heard == [whole, evolve(whole, error="disk full")]


# ---- the start ------------------------------------------------------------------------------------------------------


class Starts:
    """Ranks or engines whose start takes a number of polls, then succeeds or fails; counts what is asked of them."""

    def __init__(self, polls: int, error: CorerlError | None = None) -> None:
        self.polls, self.error = polls, error
        self.asked: list[str] = []

    def __len__(self) -> int:
        return 2

    def ready(self, timeout: float) -> bool:
        self.polls -= 1
        return self.polls < 0

    def start(self) -> Future[Any]:
        """Of engines, none of which has died."""
        return self._call("construct").then(lambda _: {})

    def construct(self) -> Future[Any]:
        return self._call("construct")

    def init(self) -> Future[Any]:
        return self._call("init")

    def sleep(self) -> None:
        self.asked.append("sleep")

    def _call(self, verb: str) -> Future[Any]:
        def wait() -> str:
            assert self.polls < 1000, "waits for what takes too long"
            if self.error is not None:
                raise self.error
            return f"{verb} is done"

        self.asked.append(verb)
        return Future(self, self.ready, wait)


class DiesAtFirst(Starts):
    """Ranks of which one dies as they start, so many times."""

    def __init__(self, deaths: int) -> None:
        super().__init__(0, WorkerDied("actor rank 1: its process died during init"))
        self.deaths = deaths

    def restart(self) -> Future[Any]:
        self.deaths -= 1
        self.error = self.error if self.deaths else None
        return self._call("restart")


@pytest.mark.parametrize("in_turns", [True, False])
def test_ranks_that_die_in_their_start_are_restarted(in_turns: bool) -> None:
    groups: Any = {"critic": DiesAtFirst(2), "actor": DiesAtFirst(2)}
    for group in groups.values():
        group.construct = lambda: Future(object(), lambda timeout: True, lambda: None)
    ears, fleet = Ears(), cast(Any, Starts(3))
    fleet.sleep = lambda: None
    load_all(groups, fleet, progress(ears), in_turns=in_turns, restarts=2)
    assert [group.error for group in groups.values()] == [None, None]
    assert told(ears) == ["actor rank 1: its process died during init; restarting all ranks"] * 2
    groups = {"actor": DiesAtFirst(2)}
    with pytest.raises(WorkerDied, match="^actor rank 1: its process died during init$"):
        load_all(groups, None, progress(), in_turns=False, restarts=1)


def test_ranks_that_die_while_engines_load_are_restarted_afterwards() -> None:
    groups: Any = {"critic": Starts(2), "actor": DiesAtFirst(1)}
    groups["critic"].restart = lambda: groups["critic"]._call("restart")
    ears, fleet = Ears(), cast(Any, Starts(5))
    load_all(groups, fleet, progress(ears), in_turns=True, restarts=1)
    assert groups["actor"].asked == groups["critic"].asked == ["construct", "restart"]
    assert fleet.asked == ["construct", "sleep"]
    assert told(ears) == ["actor rank 1: its process died during init; restarting all ranks"]


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_rank_that_cannot_start_ends_the_start(in_turns: bool) -> None:
    broken: Any = Starts(1, PluginIncompatible("actor rank 1 on node-7: versions do not fit"))
    fleet: Any = Starts(1_000_000)
    with pytest.raises(PluginIncompatible, match="^actor rank 1 on node-7: versions do not fit$"):
        load_all({"critic": Starts(3), "actor": broken}, fleet, progress(), in_turns=in_turns, restarts=0)  # type: ignore[dict-item]
    assert fleet.asked == ["construct"] and fleet.polls > 999_000
