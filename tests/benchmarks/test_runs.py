from __future__ import annotations

import argparse
import tomllib

import pytest

from benchmarks import grpo_step, steady
from benchmarks.runs import Ended, sglang, value


def ended(*steps: dict[str, float], output: str = "") -> Ended:
    return Ended(status=0, seconds=1.0, steps=steps, evaluations=(), output=output)


def test_values_are_read_back_from_the_command_line_as_they_were() -> None:
    given = {"name": "qwen3", "tied": True, "heads": 4, "theta": 1e6, "more": {"factor": 0.5, "kind": "yarn"}}
    assert tomllib.loads(f"given={value(given)}")["given"] == given
    settings = dict(each.split("=", 1) for each in sglang(launcher="somewhere", memory=0.2, server={"x": 1}))
    assert settings["rollout.engine"] == "sglang"
    assert tomllib.loads("\n".join(f"{name}={each}" for name, each in list(settings.items())[1:])) == {
        "engines": {"sglang": {"server": {"x": 1}, "memory": 0.2, "launcher": "somewhere"}}
    }


def test_means_leave_out_the_first_steps_and_steps_that_lack_a_phase() -> None:
    run = ended({"time/train": 9.0, "time/step": 10.0}, {"time/train": 1.0, "time/step": 2.0}, {"time/step": 4.0})
    assert run.phases(after=1) == {"train": 1.0, "step": 3.0}


def test_growth_is_told_of_each_kind_of_memory_in_a_step() -> None:
    assert steady.slope([5.0, 7.0, 9.0]) == pytest.approx(2.0)
    # Resident and asleep take turns within a step: the largest grows by 1 MiB, the smallest stays.
    seen = {
        step: steady.Seen(gpu=[100.0 + step, 20.0], host=[7.0, 7.0], shared=[0.0], processes={"1 rank": 7.0 + 2 * step})
        for step in range(6)
    }
    args = argparse.Namespace(backend="fsdp", tiny=False)
    run = ended(*[{"time/step": 0.1} for _ in range(6)])
    report = steady.report(args, run, seen, "command")
    told = [(number.what, *number.values) for number in report.numbers]
    at = told.index(("GPU: largest of each step", 102.0, 103.0, 104.0, 105.0))
    assert told[at + 1] == ("its growth a step", pytest.approx(1.0))
    assert told[at + 2] == ("GPU: smallest of each step", 20.0, 20.0, 20.0, 20.0)
    assert told[at + 3] == ("its growth a step", pytest.approx(0.0))
    assert ("grew since step 2: 1 rank", 6.0) in told
    assert ("updates whose weights were verified in the engine", 7) in told
    untold = ended({"time/step": 0.1}, output="engine-0 cannot report what it\n has loaded (Engine.weight_sums)")
    told = [(number.what, *number.values) for number in steady.report(args, untold, seen, "command").numbers]
    assert ("updates whose weights were verified in the engine", 0) in told


def test_a_step_is_its_phases_and_what_lies_between_them_beside_their_limits() -> None:
    steps = [
        {
            "time/rollout": 3.0 + n,
            "time/train": 2.0,
            "time/step": 6.0 + n,
            "rollout/response_length": 8.0,
            "rollout/logprob_diff": 0.01,
            "perf/tokens_per_second": 5.0,
        }
        for n in range(5)
    ]
    args = argparse.Namespace(
        limit=["rollout=2", "train=1"],
        warm=3,
        tiny=False,
        shape="0.6b",
        backend="fsdp",
        prompts=1,
        samples=1,
        ranks=1,
        replicas=1,
        tensor_parallel=1,
    )
    report = grpo_step.report(args, ended(*steps), "command")
    assert [(each.what, list(each.ratios)) for each in report.comparisons] == [
        ("rollout", [3.0, 3.5]),
        ("train", [2.0, 2.0]),
        ("step", [3.0, pytest.approx(10 / 3)]),
    ]
    told = {number.what: list(number.values) for number in report.numbers}
    assert told["in it: rollout"] == [6.0, 7.0]
    assert told["in it: the driver, between phases"] == [1.0, 1.0]
    assert told["in it: train, share"] == pytest.approx([100 * 2 / 9, 100 * 2 / 10])
    with pytest.raises(SystemExit, match="no phase 'trian'; it has rollout, train"):
        grpo_step.report(argparse.Namespace(**{**vars(args), "limit": ["trian=1"]}), ended(*steps), "command")
