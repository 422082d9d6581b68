"""The episodes of examples/two_turn_tool.toml, by hand and in whole runs of a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.data.prompts import SortDigits
from corerl_agents.script import scripted
from examples.two_turn_tool import fetch
from tests.end_to_end.command import metrics
from tests.in_process import execute_here, small

PROMPT = SortDigits(held_out=1, seed=0).prompt(35018)


def test_half_of_the_digits_are_worth_half() -> None:
    with scripted(PROMPT, ["6", "01358"]) as script:
        assert fetch(script.episode) == pytest.approx(1.0)
    assert script.asked == [["6?"], ["6?", "6", "01358>"]]
    assert [request.max_tokens for request in script.requests] == [1, None]
    with scripted(PROMPT, ["6", "0135899999"]) as script:
        assert fetch(script.episode) == pytest.approx(0.2 + 0.8 * 0.5)


def test_a_run_of_episodes_trains_on_its_engines_tokens(tmp_path: Path) -> None:
    tiny = ["model.tokenizer=characters:0123456789>s?", "model.config.vocab_size=17", "rollout.max_tokens=16"]
    summary = execute_here(
        small(
            tmp_path,
            *tiny,
            "rollout.sampler=episodes",
            "samplers.episodes.function=examples.two_turn_tool:fetch",
            "rollout.source=one-step-off",
            "run.steps=2",
            "eval.every=2",
            "checkpoint.every=0",
        )
    )
    assert summary.steps_done == 2 and set(summary.evaluation) >= {"eval/reward", "eval/exact_match"}
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["rollout/turns"] for line in steps] == [2.0, 2.0]
    for line in steps:
        tool = 1 / 32  # at least ">" in each of the 32 samples
        assert line["rollout/response_length"] == line["rollout/tokens"] / 32
        assert line["rollout/span"] >= line["rollout/response_length"] + tool
    assert [line["rollout/staleness"] for line in steps] == [0.0, 1.0]
