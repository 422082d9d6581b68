"""What the newest steps of a run say about it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

from corerl_page.findings import FEW, Finding, findings
from corerl_page.runs import Summary, by_engine

CONFIG = {"rollout": {"max_tokens": 3, "prompts": 4, "samples": 16}, "train": {"mini_batches": 2, "epochs": 1}}
RECOMPUTE = {"algorithm": {"old_logprobs": "recompute"}}


def found(
    config: dict[str, Any] | None = None, samples: Sequence[Summary] = (), /, *, running: bool = True, **metrics: Any
) -> list[Finding]:
    by_step = {name.replace("__", "/"): dict(enumerate(values)) for name, values in metrics.items()}
    kept = {step: list(each) for step, each in groupby(samples, key=lambda each: each.step)}
    newest = [each for step in list(kept)[-FEW:] for each in kept[step]]
    diffs = {step: {of.engine: of.diff or 0.0 for of in by_engine(each)} for step, each in kept.items()}
    return list(findings(by_step, {**CONFIG, **(config or {})}, newest, diffs, running=running))


def sample(number: int, step: int = 0, **facts: Any) -> Summary:
    return Summary(id=number, step=step, kind="sampled", number=number, prompt="", response="", reward=0.0, **facts)


def of_engines(*diffs: float, step: int = 0) -> list[Summary]:
    """Four samples of each engine, those of engine-1 of three times as many tokens."""
    of = [at % len(diffs) for at in range(4 * len(diffs))]
    return [sample(at, step, engines=(own,), diff=diffs[own], tokens=6 if own == 1 else 2) for at, own in enumerate(of)]


def test_a_run_without_trouble_has_none() -> None:
    assert found(rollout__truncated=[0.9] * 30 + [0.01] * 10, rollout__logprob_diff=[1e-7] * 40) == []


def test_cut_off_answers_are_counted_of_all() -> None:
    (one,) = found(rollout__truncated=[0.0, *[0.75] * 10], rollout__response_length=[2.9] * 11)
    assert (one.level, one.sort) == ("error", "-truncated")
    assert one.what == (
        "in the last 10 steps, 480 of 640 samples (75 %) are cut off at rollout.max_tokens = 3, and at least 20 % of "
        "each step's since step 1; the mean length of all is 2.9 tokens"
    )
    (one,) = found(rollout__truncated=[0.75], eval__truncated=[0.0, 0.25])
    assert "; 25 % of the held-out answers of the newest evaluation are cut off too" in one.why
    (one,) = found(rollout__truncated=[0.75], eval__truncated=[0.25, 0.0])
    assert "held-out" not in one.why
    (one,) = found({"samplers": {"episodes": {"roles": ["a", "b"]}}}, rollout__truncated=[0.75])
    assert one.what.startswith("in the last step, 75 % of samples are cut off")  # how many roles have spoken, who knows


@pytest.mark.parametrize(
    ("overlong", "why", "fix"),
    [
        ("keep", "an answer without its end earns", "'penalty' or 'mask'"),
        ("mask", "they are left out of training", "or set algorithm.overlong = 'penalty'"),
        ("penalty", "each loses up to 1", "raise rollout.max_tokens to what whole answers need"),
    ],
)
def test_no_advice_is_what_the_run_does_already(overlong: str, why: str, fix: str) -> None:
    (one,) = found({"algorithm": {"overlong": overlong}}, rollout__truncated=[0.5])
    assert one.why.startswith(why) and one.fix.endswith(fix)
    (one,) = found({"algorithm": {"overlong": overlong}}, rollout__truncated=[0.95])  # nothing is left to learn from
    assert one.fix == "raise rollout.max_tokens to what whole answers need"
    equal = {"rollout__groups_without_spread": [1.0], "rollout__reward": [0.0]}
    assert "dynamic_sampling" in found(**equal)[0].fix
    assert "dynamic_sampling" not in found({"algorithm": {"dynamic_sampling": 2}}, **equal)[0].fix


@pytest.mark.parametrize(
    ("mean", "config", "levels"),
    [
        (0.009, {}, []),
        (0.02, {}, ["warning"]),
        (0.4, {}, ["error"]),
        (0.09, {"train": {"precision": "bfloat16"}}, []),
        (0.4, {"train": {"precision": "bfloat16"}}, ["warning"]),
        (0.25, {"weights": {"quantize": "fp8"}}, []),
        (0.25, {"algorithm": {"mismatch_bound": 0.2}, "weights": {"quantize": "fp8"}}, ["warning"]),
    ],
)
def test_a_mismatch_is_judged_by_the_runs_bound(mean: float, config: dict[str, Any], levels: list[str]) -> None:
    assert [each.level for each in found(config, rollout__logprob_diff=[mean])] == levels


def test_the_engine_that_differs_is_named() -> None:
    metrics = {"rollout__logprob_diff": [2.0], "rollout__staleness": [0.0]}
    (one,) = found(RECOMPUTE, of_engines(1e-7, 4.0), **metrics)
    assert one.why.startswith(
        "of the kept samples, engine-0's 8 tokens differ by 1e-07 on average (0 of 4 samples by more than 0.1), "
        "engine-1's 24 tokens differ by 4 on average (4 of 4 "
    )
    assert "engine-1 alone computes other log-probs: it holds other weights than it says (tokens count as 0" in one.why
    assert "rollout.restarts" in one.fix and "--layers" not in one.fix
    (one,) = found(RECOMPUTE, of_engines(1e-7, 4.0, 1e-7, 4.0, 1e-7), **metrics)
    assert "engine-1 and engine-3 alone compute other log-probs: they hold" in one.why
    (one,) = found(RECOMPUTE, of_engines(3.0, 4.0), **metrics)
    assert "the engines differ alike" in one.why and "--layers" in one.fix
    (one,) = found(RECOMPUTE, of_engines(3.0, 4.0), **{**metrics, "rollout__staleness": [1.0]})
    assert "the tokens are 1 updates old" in one.why and "--layers" not in one.fix
    (one,) = found(**metrics)
    assert "old_logprobs = 'recompute'" in one.fix


def test_engines_on_both_sides_of_the_bound_are_alike() -> None:
    assert found(RECOMPUTE, of_engines(0.009, 0.0105), rollout__logprob_diff=[0.0098]) == []
    (one,) = found(RECOMPUTE, of_engines(0.009, 0.012), rollout__logprob_diff=[0.0105], rollout__staleness=[1.0])
    assert "the tokens are 1 updates old" in one.why and "other weights" not in one.why


@pytest.mark.parametrize(
    ("mean", "of_last", "since"),
    [
        ([1e-7] * 3 + [0.3] * 27, [1e-7] * 3 + [0.6] * 27, 3),
        ([0.3] + [1e-7] * 3 + [0.3] * 26, [0.6] + [1e-7] * 3 + [0.6] * 26, 4),  # what was before has passed
        ([1e-7] * 3 + [0.005] * 27, [1e-7] * 3 + [0.1] * 27, 3),  # of 19 good ones it is seen in the samples alone
        ([0.3] * 30, [0.6] * 30, 0),
    ],
)
def test_a_difference_is_dated(mean: list[float], of_last: list[float], since: int) -> None:
    others = [1e-7] * (1 if max(mean) > 0.01 else 19)
    kept = [each for step, diff in enumerate(of_last) for each in of_engines(*others, diff, step=step)]
    (one,) = found(RECOMPUTE, kept, running=False, rollout__logprob_diff=mean)
    assert one.what.endswith(f"; since step {since}")
    begin = f"resume from a checkpoint of before step {since} " if since else "begin again"
    assert one.fix.startswith(begin) and "end that" not in one.fix
    (one,) = found(RECOMPUTE, kept, rollout__logprob_diff=mean)
    assert one.fix.startswith("end that engine's process")


def test_one_wrong_engine_of_many_is_found() -> None:
    (one,) = found(RECOMPUTE, of_engines(*[1e-7] * 19, 0.15), rollout__logprob_diff=[0.0075])
    assert (one.level, "engine-19 alone computes other" in one.why) == ("error", True)


def test_equal_rewards_that_teach_are_no_finding() -> None:
    equal = {"rollout__groups_without_spread": [0.75, 1.0], "rollout__reward": [0.5, 0.5]}
    (one,) = found({}, [sample(at, advantage=0.0 if at < 9 else 1.0) for at in range(10)], **equal)
    assert one.what.startswith("in the last 2 steps, all samples have the same reward in 7 of 8 groups (88 %); ")
    assert one.what.endswith("the mean reward is 0.5")
    assert one.why == "9 of 10 kept samples have an advantage of 0, and teach nothing"
    # As of algorithms that compare rewards over the whole batch.
    assert found({}, [sample(at, advantage=float(at % 3 - 1)) for at in range(9)], **equal) == []


def test_taking_turns_on_a_device_is_not_idleness() -> None:
    seconds = {"time__step": [1.0], "idle__engines__training": [0.8], "idle__engines__total": [0.8]}
    assert found({"cluster": {"placement": "colocated"}}, **seconds) == []
    (one,) = found({"cluster": {"placement": "disaggregated"}}, **seconds)
    assert "engines do nothing in 0.8 of the 1 s of a step (80 %), most of it waiting for training (0.8 s)" in one.what


def test_the_gravest_comes_first() -> None:
    idle = {"time__step": [1.0], "idle__ranks__samples": [0.7]}
    levels = found(**idle, rollout__logprob_diff=[0.02], rollout__truncated=[0.75])  # in the order of the rules
    assert [each.level for each in levels] == ["error", "warning", "info"]
