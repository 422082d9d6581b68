"""The episodes of examples/compaction.toml, by hand and in whole runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from corerl.data.prompts import Prompt
from corerl_agents.script import Scripted, scripted
from examples.compaction import remember
from tests.end_to_end.command import ROOT, Command, metrics
from tests.in_process import execute_here, small

ANSWER = "01358"
NEW, SUMMED_UP = (Prompt(index=index, text="?", answer=ANSWER) for index in (10, 11))
TOKENS = "characters:0123456789>s!"


def texts(script: Scripted) -> list[str]:
    """What was asked, one text for each request."""
    return ["".join(each) for each in script.asked]


def test_an_episode_goes_on_from_its_summary() -> None:
    with scripted(NEW, ["0135", "01358"]) as script:
        assert asyncio.run(remember(script.episode)) == 1.0
    assert texts(script) == ["013>5>s", "0135>8>!"]
    assert [[text for text, sampled in row if sampled] for row in script.rows] == [["0135<|end|>"], ["01358<|end|>"]]


@pytest.mark.parametrize(
    ("summary", "begins", "answer", "reward"),
    [("9", "9>", "8", 0.0), ("01235678", "0123>", "01238", 0.6), ("", ">", "01358", 1.0)],
)
def test_what_a_summary_leaves_out_is_gone(summary: str, begins: str, answer: str, reward: float) -> None:
    with scripted(NEW, [summary, answer]) as script:
        assert asyncio.run(remember(script.episode)) == pytest.approx(reward)
    assert texts(script) == ["013>5>s", f"{begins}8>!"]


def test_rows_of_an_episode_are_trained_on_together(tmp_path: Path) -> None:
    summary = execute_here(
        small(
            tmp_path,
            f"model.tokenizer={TOKENS}",
            "model.config.vocab_size=17",
            "rollout.max_tokens=6",
            "rollout.context_length=15",
            "rollout.sampler=episodes",
            "samplers.episodes.function=examples.compaction:remember",
            "run.steps=2",
            "eval.every=2",
            "checkpoint.every=0",
        )
    )
    assert summary.steps_done == 2
    for line in (line for line in metrics(tmp_path / "run") if "train/loss" in line):
        assert 1.0 < line["rollout/rows"] < 2.0 and line["rollout/rows"] == line["rollout/turns"]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(("memory", "least", "most"), [("summary", 0.9, 1.0), ("newest", 0.3, 0.85)])
def test_summaries_are_learned_from_the_reward_of_the_answer(
    memory: str, least: float, most: float, tmp_path: Path
) -> None:
    options = f"samplers.episodes.options={{memory='{memory}'}}"
    file = ROOT / "examples" / "compaction.toml"
    with Command("train", file, options, f"run.dir={tmp_path}/run", logs=tmp_path) as command:
        assert command.finish() == 0, command.err
    last = [line for line in metrics(tmp_path / "run") if "eval/reward" in line][-1]
    assert least < last["eval/reward"] <= most
