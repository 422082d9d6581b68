"""The episodes of examples/compaction.toml, by hand and in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT, Command, metrics
from tests.in_process import execute_here, small

TOKENS = "characters:0123456789>s!"


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
