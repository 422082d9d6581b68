"""What a plan says of data that are not those of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.data.prompts import PromptStream, SortDigits
from corerl.errors import CheckpointError
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from tests.driver.saved import config_in, make_config, make_model, save

HELD_OUT = "rows that were trained on and are held out now: 4"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = make_config()
    return save(tmp_path / "run", config, make_model(config, seed=1), step=2)


def plan_with(checkpoint: Path, *, mode: str = "train", starting: bool = True, **data: Any) -> Plan:
    config = config_in(checkpoint.parents[2] / "other", str(checkpoint), data={"held_out": 16, **data})
    return make_plan(evolve(config, run=evolve(config.run, mode=mode)), starting=starting)


@pytest.mark.parametrize("starting", [True, False])
def test_other_data_are_refused_by_run_and_check(checkpoint: Path, starting: bool) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_with(checkpoint, starting=starting, held_out=20)
    assert caught.value.message == (
        f"checkpoint.resume: the data are not the checkpoint's: {HELD_OUT}; use the same [data] and run.seed, or set "
        "data.restart=true to begin these at their first prompt, with the checkpoint's weights, optimizer and step"
    )


def test_restarted_data_begin_at_their_first_prompt(checkpoint: Path) -> None:
    plan = plan_with(checkpoint, held_out=20, restart=True)
    assert f"data: not the checkpoint's: {HELD_OUT}; they begin at their first prompt" in plan.notices
    prompts, fresh = plan.rollout.prompts, SortDigits(held_out=16, seed=0)
    assert prompts.held_out[:16].tolist() == fresh.held_out.tolist()
    stream = PromptStream(prompts, seed=0)
    assert not stream.restore(plan.start.state["source"]["prompts"])
    assert stream.position["sources"] == [{"epoch": 1, "offset": 0, "prompts": 10**5 - 20, "taken": 0}]


def test_unchanged_data_continue_with_or_without_restart(checkpoint: Path) -> None:
    for restart in (False, True):
        plan = plan_with(checkpoint, restart=restart)
        assert not [line for line in plan.notices if line.startswith("data")]
        stream = PromptStream(plan.rollout.prompts, seed=0)
        assert stream.restore(plan.start.state["source"]["prompts"])
        whole = PromptStream(SortDigits(held_out=16, seed=0), seed=0).take(20)
        assert stream.take(4) == whole[16:]  # 2 steps of 8
