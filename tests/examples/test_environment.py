"""examples/plugins/environment: its name in a config is all that a run of it needs; rewards are compared by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.config.load import config_of
from corerl.plan.make import make_plan
from tests.end_to_end.command import metrics
from tests.examples.packages import put
from tests.in_process import execute_here, small


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(put("environment", tmp_path / "site")))
    yield
    for module in [name for name in sys.modules if name.partition(".")[0] == "my_sums"]:
        del sys.modules[module]


def worth(sample: dict[str, str]) -> float:
    """By hand: the whole for the sum, a tenth more for a number."""
    a, b = sample["prompt"].removesuffix("=").split("+")
    said = sample["response"]
    return float(said == str(int(a) + int(b))) + 0.1 * (said != "" and set(said) <= set("0123456789"))


def test_a_run_trains_on_its_prompts_and_its_rewards(tmp_path: Path) -> None:
    model = ["model.tokenizer=characters:0123456789+=", "rollout.max_tokens=3"]
    own = ["rollout.sampler=sums", "rollout.source=asynchronous", "samplers.sums.largest=9"]
    steps = ["run.steps=2", "eval.every=2", "checkpoint.every=0", 'extensions=[{name="jsonl",options={samples="all"}}]']
    summary = execute_here(small(tmp_path, *model, *own, *steps))
    assert summary.steps_done == 2
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and len(shown) > 32
    assert [each["reward"] for each in shown] == pytest.approx([worth(each) for each in shown])
    for line in lines:
        assert line["rollout/reward"] == pytest.approx(line["reward/right"] + line["reward/number"], abs=1e-6)
        assert line["rollout/reward"] > 0


def test_its_name_is_all_that_a_config_needs(tmp_path: Path) -> None:
    tables = {"backend": {"name": "plain"}, "run": {"dir": str(tmp_path / "run")}, "cluster": {"device": "cpu"}}
    config = {"model_type": "qwen3", "vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "eos_token_id": 2}
    heads = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    tables["model"] = {"tokenizer": "characters:0123456789+=", "config": {**config, **heads}}
    plan = make_plan(config_of({**tables, "rollout": {"sampler": "sums"}}))
    assert len(plan.rollout.prompts) == 100 * 100
    assert plan.rollout.prompts.prompt(203).text == "2+3=" and plan.rollout.prompts.prompt(203).answer == "5"
    assert " on sums: " in plan.title
