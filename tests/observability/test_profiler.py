from __future__ import annotations

import json
from pathlib import Path

import pytest

from corerl.observability.profiler import Profiler
from corerl.observability.specs import ProfilerOptions
from tests.observability.hosts import LOSS, batch, host, step


def test_the_chosen_steps_leave_a_trace_of_their_operations_and_a_table(tmp_path: Path) -> None:
    options = ProfilerOptions(steps="1,3", rows=5, record_shapes=True)
    profiled = host(tmp_path, profiler=Profiler(options=options, run_dir=str(tmp_path)))
    for index in range(4):
        assert profiled.train(batch(), LOSS, step(index)).applied
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == [f"actor-0-step-{each}.{kind}" for each in (1, 3) for kind in ("json", "txt")]
    events = json.loads((tmp_path / "profile/actor-0-step-1.json").read_text())["traceEvents"]
    # Three matrices of the two MLPs, in each direction, among others.
    assert sum(event.get("name") == "aten::mm" for event in events) >= 6
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("name", "").startswith("Optimizer.step") for event in events)
    assert "Self CPU time total" in (tmp_path / "profile/actor-0-step-3.txt").read_text()


def test_another_rank_is_left_alone(tmp_path: Path) -> None:
    profiled = host(tmp_path, profiler=Profiler(options=ProfilerOptions(steps="0", ranks=(1,)), run_dir=str(tmp_path)))
    profiled.train(batch(), LOSS, step(0))
    assert list(tmp_path.iterdir()) == []


def test_two_profilers_at_once_are_no_reason_to_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (Profiler(options=ProfilerOptions(steps="0"), run_dir=str(tmp_path / name)) for name in ("a", "b"))
    assert host(tmp_path, one=one, two=two).train(batch(), LOSS, step(0)).applied
    assert (tmp_path / "a/profile/actor-0-step-0.json").exists()
    assert capsys.readouterr().err.startswith("warning: actor-0 is not profiled")
