from __future__ import annotations

import json
from pathlib import Path

import pytest

from corerl.errors import HookFailed
from corerl_observe.profiler import Profiler
from corerl_observe.specs import ProfilerOptions
from corerl_testing import PluginHost
from plugins.observe.tests.hosts import LOSS, batch, failing, host, step, train


def profiled_at(steps: str, run_dir: Path, **more: object) -> PluginHost:
    return host(run_dir, profiler=Profiler(options=ProfilerOptions(steps=steps), run_dir=str(run_dir)), **more)


def operations(run_dir: Path, step: int) -> list[str]:
    events = json.loads((run_dir / f"profile/actor-0-step-{step}.json").read_text())["traceEvents"]
    return [event.get("name", "") for event in events]


def test_chosen_steps_leave_a_trace_and_a_table(tmp_path: Path) -> None:
    options = ProfilerOptions(steps="1,3", rows=5, record_shapes=True)
    profiled = host(tmp_path, profiler=Profiler(options=options, run_dir=str(tmp_path)))
    for index in range(4):
        assert train(profiled, batch(), step(index)).applied
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == [f"actor-0-step-{each}.{kind}" for each in (1, 3) for kind in ("json", "txt")]
    events = json.loads((tmp_path / "profile/actor-0-step-1.json").read_text())["traceEvents"]
    # Three matrices of the two MLPs, in each direction, among others.
    assert sum(event.get("name") == "aten::mm" for event in events) >= 6
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("name", "").startswith("Optimizer.step") for event in events)
    assert "Self CPU time total" in (tmp_path / "profile/actor-0-step-3.txt").read_text()


def test_a_step_of_several_calls_is_one_profile(tmp_path: Path) -> None:
    profiled = profiled_at("1", tmp_path)
    for index in range(3):
        for last in (False, False, True):
            profiled.forward_backward(batch(), LOSS, (), last)
        profiled.optimizer_step(step(index), 1.0)
    assert [path.name for path in (tmp_path / "profile").glob("*.json")] == ["actor-0-step-1.json"]
    names = operations(tmp_path, 1)
    train(profiled_at("0", tmp_path / "once"), batch(), step(0))
    passed = operations(tmp_path / "once", 0).count("aten::_log_softmax")
    assert names.count("aten::_log_softmax") == 3 * passed > 0
    assert sum(name.startswith("Optimizer.step") for name in names) == 1


def test_a_call_that_fails_ends_the_profile_that_it_began(tmp_path: Path) -> None:
    with pytest.raises(HookFailed, match="out of luck"):
        train(profiled_at("0", tmp_path, fails=failing("forward_backward")), batch(), step(0))
    train(profiled_at("0", tmp_path / "other"), batch(), step(0))  # torch allows one at a time
    assert [path.name for path in tmp_path.glob("**/*.json")] == ["actor-0-step-0.json"]
    assert (tmp_path / "other/profile/actor-0-step-0.json").exists()


def test_two_profilers_at_once_do_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (Profiler(options=ProfilerOptions(steps="0"), run_dir=str(tmp_path / name)) for name in ("a", "b"))
    assert train(host(tmp_path, one=one, two=two), batch(), step(0)).applied
    assert (tmp_path / "a/profile/actor-0-step-0.json").exists()
    assert capsys.readouterr().err.startswith("warning: actor-0 is not profiled")
