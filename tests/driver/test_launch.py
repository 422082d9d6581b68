"""What the processes of a run are given; that they start, work and end is tested in tests/end_to_end."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import evolve

from corerl.calls import Future
from corerl.cluster.heartbeat import Pending, Watching
from corerl.cluster.placement import Bundle, Gpu, Slot
from corerl.cluster.process import CallResult
from corerl.driver import launch as driver
from corerl.driver.launch import (
    emit_call,
    launch,
    load_all,
    make_fleet,
)
from corerl.driver.progress import Progress
from corerl.errors import (
    CheckpointDamaged,
    CorerlError,
    PluginIncompatible,
    SaveFailed,
    WorkerDied,
)
from corerl.observability.jsonl import read_notices
from corerl.observability.timing import Spans
from corerl.plan.make import make_plan
from corerl.plugin.events import CallFinished, Notice, PhaseStarted, RunFinished, RunStarted, Span
from corerl.plugin.observers import Observers
from tests.checkpoint.changes import flip
from tests.driver.fakes import Ears, progress, told
from tests.driver.saved import config_in, make_config
from tests.in_process import execute_here, small


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
    telling = Progress(Observers([("hears", hears)]), 0)
    pending = Pending("train at optimizer step 2", 0, {}, (), asked=1.0)
    spans = (Span(name="optimizer", started=3.0, ended=4.0),)
    waits = (Span(name="all_reduce", started=3.5, ended=3.75),)
    done = CallResult(value="much", started=2.0, ended=4.0, method="train", lane=1, spans=spans, waits=waits)
    emit_call(telling, "actor rank 0", pending, done)
    whole = CallFinished(
        process="actor rank 0", verb="train", call="train at optimizer step 2", asked=1.0, started=2.0, ended=4.0,
        lane=1, spans=spans, waits=waits,
    )  # fmt: skip
    emit_call(telling, "actor rank 0", pending, evolve(done, value=None, error=SaveFailed("disk full")))
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
def test_ranks_that_die_as_they_start_are_restarted_as_often_as_allowed(in_turns: bool) -> None:
    groups: Any = {"critic": DiesAtFirst(2), "actor": DiesAtFirst(2)}
    for group in groups.values():
        group.construct = lambda: Future(object(), lambda timeout: True, lambda: None)
    ears, fleet = Ears(), cast(Any, Starts(3))
    fleet.sleep = lambda: None
    results = load_all(groups, fleet, progress(ears), in_turns=in_turns, restarts=2)
    assert results == {"critic": "restart is done", "actor": "restart is done"}
    assert told(ears) == ["actor rank 1: its process died during init; restarting all ranks"] * 2
    groups = {"actor": DiesAtFirst(2)}
    with pytest.raises(WorkerDied, match="^actor rank 1: its process died during init$"):
        load_all(groups, None, progress(), in_turns=False, restarts=1)


def test_a_run_that_has_finished_needs_no_in_memory_checkpoint() -> None:
    done: list[str] = []

    def complete(*, wait: bool) -> None:
        done.append("complete")
        raise SaveFailed("no space left in memory")

    group = SimpleNamespace(shutdown=done.append)
    run: Any = SimpleNamespace(
        sampling=SimpleNamespace(source=SimpleNamespace(close=lambda: done.append("close"))),
        saves=SimpleNamespace(memory=SimpleNamespace(complete=complete)),
        roles={"actor": SimpleNamespace(group=group)},
        updates=None,
    )
    driver._close(run)
    assert done == ["close", "complete", "finished"]


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_rank_that_cannot_start_ends_the_start(in_turns: bool) -> None:
    broken: Any = Starts(1, PluginIncompatible("actor rank 1 on node-7: versions do not fit"))
    fleet: Any = Starts(1_000_000)
    with pytest.raises(PluginIncompatible, match="^actor rank 1 on node-7: versions do not fit$"):
        load_all({"critic": Starts(3), "actor": broken}, fleet, progress(), in_turns=in_turns, restarts=0)  # type: ignore[dict-item]
    assert fleet.asked == ["construct"] and fleet.polls > 999_000


def test_in_turns_engines_sleep_before_ranks_load() -> None:
    hears, ranks, fleet = Ears(), Starts(0), Starts(2)
    telling = Progress(Observers([("hears", hears)]), 0)
    found: Any = load_all({"actor": ranks}, fleet, telling, in_turns=True, restarts=0)  # type: ignore[dict-item,arg-type]
    assert found == {"actor": "init is done"}
    assert (ranks.asked, fleet.asked) == (["construct", "init"], ["construct", "sleep"])
    assert [event.name for event in hears.heard if isinstance(event, PhaseStarted)] == [
        "loading the model into engines, which will sleep while the ranks load",
        "loading the model into ranks",
    ]


def test_a_run_skips_checkpoints_whose_tensors_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["checkpoint.every=1", "checkpoint.keep=0", "run.steps=3", "train.schedule.steps=4"]
    execute_here(small(tmp_path, *given))
    checkpoints = tmp_path / "run/checkpoints"
    last = "actor/rank-00000.safetensors"
    second, third = (checkpoints / f"step-0000000{step}" for step in (2, 3))
    wanted = (third / last).read_bytes()
    flip(third / last, "exp_avg/model.norm.weight@0")
    flip(second / last, "master/model.norm.weight@0")

    resumed = small(tmp_path, *given, "checkpoint.resume=auto", "run.steps=4")
    hears = Ears()
    monkeypatch.setattr(driver, "load_observers", lambda *_: Observers([("hears", hears)]))
    assert execute_here(resumed).steps_done == 4
    starts = [event.first_step for event in hears.heard if isinstance(event, RunStarted)]
    assert starts == [3, 2, 1]
    lines = [event.text for event in hears.heard if isinstance(event, Notice) and "skipping" in event.text]
    why = "the run falls back to an older checkpoint"
    of_third = f"checkpoint.resume: skipping step-00000003, {why}: {third / last}: 'exp_avg' of 'model.norm.weight' is"
    of_second = f"checkpoint.resume: skipping step-00000002, {why}: {second / last}: 'master' of 'model.norm.weight' is"
    wholly = " not what was saved (its checksum differs)"  # and no advice to do what is being done
    assert lines == [f"{of_third}{wholly}", f"{of_third}{wholly}", f"{of_second}{wholly}"]  # with each restart, all
    assert hears.ends == ["restarted", "restarted", "finished"]
    assert [event.reason for event in hears.heard if isinstance(event, RunFinished)] == ["finished"]
    assert (third / last).read_bytes() == wanted  # trained again from step 1

    flip(checkpoints / "step-00000004" / last, "master/model.norm.weight@0")
    named = small(tmp_path, *given, f"checkpoint.resume={checkpoints}/step-00000004", "run.steps=5")
    with pytest.raises(CheckpointDamaged, match="'master' of 'model.norm.weight' is not what was saved"):
        execute_here(named)


def test_a_run_without_extensions_prints_and_keeps_its_notices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute_here(small(tmp_path, "extensions=[]", "run.steps=1", "backends.elsewhere.stage=1"))
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("corerl: note: ")]
    kept = [notice.text for notice in read_notices(tmp_path / "run")]
    assert printed == [f"corerl: note: {text}" for text in kept] != []


# ---- the end by a failure --------------------------------------------------------------------------------------------


def test_a_death_that_ends_the_run_comes_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(plan: object, progress: Progress, *_: Any) -> None:
        progress.steps_done = 4
        raise WorkerDied("engine-0: its process died during generate")

    monkeypatch.setattr(driver, "_assemble", dies)
    with pytest.raises(WorkerDied) as raised:
        execute_here(small(tmp_path))
    assert raised.value.__notes__ == ["the run ended in step 5"]


class Saves:
    """A checkpoint in flight, which can be rescued or not."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked = 0

    def rescue(self, *, ask: bool = True) -> None:
        self.asked += ask
        if self.error is not None:
            raise self.error


class FakeRun:
    def __init__(self, error: Exception | None = None) -> None:
        self.saves: Any = SimpleNamespace(disk=Saves(error))
        self.ears = Ears()
        self.progress = progress(self.ears, step=3)


@pytest.mark.parametrize(
    ("failure", "lost", "asked", "notices"),
    [
        (ValueError("a fault"), None, 1, []),
        (
            ValueError("a fault"),
            WorkerDied("the ranks have ended"),
            1,
            ["the checkpoint being written is lost: WorkerDied: the ranks have ended"],
        ),
        (SaveFailed("a fault"), None, 0, []),
        (KeyboardInterrupt("a fault"), None, 0, []),  # by a second signal
    ],
    ids=repr,
)
def test_a_failure_rescues_the_save_in_flight_and_stays_the_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    lost: Exception | None,
    asked: int,
    notices: list[str],
) -> None:
    run = FakeRun(lost)
    monkeypatch.setattr(driver, "_assemble", lambda *_: run)
    config = make_config(run={"dir": str(tmp_path / "run")}, cluster={"device": "cpu"})
    with pytest.raises(type(failure), match="^a fault$"):
        with launch(functools.partial(make_plan, config)):
            raise failure
    assert (run.saves.disk.asked, told(run.ears)) == (asked, notices)
