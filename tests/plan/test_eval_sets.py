"""Sets of held-out prompts, as a run's plan has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corerl.errors import UserError
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from tests.driver.saved import DATA, config_in

MODEL = {**DATA["model"], "config": {**DATA["model"]["config"], "max_position_embeddings": 30}}
ROLLOUT = {"engine": "fake", "prompts": 2, "samples": 4, "max_tokens": 10, "temperature": 0.7, "top_k": 4}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def planned(
    tmp_path: Path, *sets: dict[str, Any], held_out: int = 2, data: dict[str, Any] | None = None, **own: Any
) -> Plan:
    """Of training prompts of 5 digits, but one of 15, and these sets; a tokenizer puts <bos> before them."""
    rows = [{"prompt": f"{n:05d}>"} for n in range(9)] + [{"prompt": "1" * 15}]
    data = {"source": write(tmp_path / "rows.jsonl", *rows), "held_out": held_out, **(data or {})}
    tables = {"model": MODEL, "data": data, "rollout": ROLLOUT, "eval": {**own, "sets": list(sets)}}
    return make_plan(config_in(tmp_path / "run", **tables))


def test_prompts_too_long_for_a_set_stay_in_others(tmp_path: Path) -> None:
    longer = {"source": write(tmp_path / "set.jsonl", {"prompt": "1" * 19}, {"prompt": "1" * 3}), "max_tokens": 20}
    plan = planned(tmp_path, longer, held_out=9, max_tokens=15)
    own, other = plan.eval_sets
    assert sorted(len(prompt.text) for prompt in other.source.held_out_prompts()) == [3]
    trained = plan.rollout.prompts
    assert len(trained.train) == 1 and not trained.left_out  # all leave room for 10 tokens
    kept = [prompt.text for prompt in trained.held_out_prompts() if len(prompt.text) < 15]
    assert [prompt.text for prompt in own.source.held_out_prompts()] == kept
    place = f"{tmp_path}/set.jsonl:1: it has 20 tokens, but at most 10 fit with eval.sets[0].max_tokens=20"
    assert f"eval.sets[0]: data: 1 of the first 2 prompts are skipped; {place} in a context of 30" in plan.notices


def test_skipped_and_trained_prompts_of_a_set_are_noted(tmp_path: Path) -> None:
    rows = [{"prompt": "00003>", "level": 7}, {"prompt": "4>", "image": "a.png"}, {"prompt": "5>", "context": "c"}]
    source = write(tmp_path / "set.jsonl", *rows)
    plan = planned(tmp_path, {"source": source}, held_out=0, data={"refused": "skip"})
    assert [prompt.text for prompt in plan.eval_sets[0].source.held_out_prompts()] == ["00003>", "5>"]
    told = [line for line in plan.notices if line.startswith("eval.sets")]
    assert "eval.sets[0]: data: 1 of 3 rows of " in {line.partition(source)[0] for line in told}
    assert told[-1] == "eval.sets: 'set': 1 of 2 held-out prompts are prompts of training rows too"


SKIPPED = "all 1 prompts are skipped: 1 of the first 1 prompts are skipped; "


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_tokens": 30}, f": {SKIPPED}"),
        ({"prompt_key": "question"}, ": "),
    ],
)
def test_a_problem_of_a_set_names_the_set(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    source = write(tmp_path / "set.jsonl", {"prompt": "7>"})
    with pytest.raises(UserError) as caught:
        planned(tmp_path, {"source": source, **given})
    assert caught.value.message.startswith(f"eval.sets[0]{told}")
