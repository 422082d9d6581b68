from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corerl.cli.main import main
from corerl.errors import CheckpointError
from corerl.plan.resume import read_run
from tests.checkpoint.changes import rewrite
from tests.driver.saved import make_config, make_model, save

STAND = {"epoch": 0, "offset": 1, "prompts": 9, "taken": 1}
POSITION: dict[str, Any] = {"sources": [STAND], "seed": 0, "data": "0"}
SCHEDULE = {"optimizer_step": 2, "rollout_step": 1, "progress": 0.5}


def stand_of(state: dict[str, Any]) -> dict[str, Any]:
    stand: dict[str, Any] = state["source"]["prompts"]["sources"][0]
    return stand


def changed(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    config = make_config()
    checkpoint = save(run_dir, config, make_model(config, seed=1), step=2)
    rewrite(checkpoint, lambda content: change(content["state"]))
    return checkpoint


def test_a_whole_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    def more(state: dict[str, Any]) -> None:
        state["before"] = [{"prompt": "1>", "response": "1", "answer": "1", "reward": 1}]
        state["kl_coef"] = 0.5
        state["source"]["prompts"] = POSITION
        state["schedules"] = {"actor": SCHEDULE}
        state["kept"] = {"actor": "0" * 32}

    state = read_run(changed(tmp_path, more))
    assert (state["rollout_step"], state["kl_coef"], state["source"]["prompts"]) == (2, 0.5, POSITION)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("config"), "state lacks 'config'"),
        (lambda state: state.update(config=[]), "state: 'config' is [], wanted an object"),
        (lambda state: state["source"].pop("rollout_step"), "state: source lacks 'rollout_step'"),
        (lambda state: state["source"].update(prompts=1), "source: 'prompts' is 1, wanted an object"),
        (lambda state: state["source"]["prompts"].pop("data"), "source: prompts lacks 'data'"),
        (lambda state: state["data"]["sources"].append({}), "state: data: sources[1] lacks 'name'"),
        (
            lambda state: state["data"]["sources"][0].update(added=[{"epoch": 1, "rows": -2}]),
            "state: data: sources[0]: added[0]: 'rows' is -2, wanted at least 0",
        ),
        (lambda state: state["source"]["prompts"].update(sources=[]), "prompts: 'sources' has 0, wanted 1"),
        (
            lambda state: state.update(schedules={"actor": {**SCHEDULE, "optimizer_step": -1}}),
            "state: schedules: actor: 'optimizer_step' is -1, wanted at least 0",
        ),
        (
            lambda state: state.update(schedules={"actor": {**SCHEDULE, "progress": None}}),
            "state: schedules: actor: 'progress' is None, wanted a finite number",
        ),
        (lambda state: state["source"].update(sampled={}), "source: sampled lacks 'data'"),
        (lambda state: state["source"].update(begun=-1), "source: 'begun' is -1, wanted at least 0"),
        (
            lambda state: stand_of(state).update(offset=10**30, prompts=8),
            f"prompts: sources[0]: 'offset' is {10**30}, wanted at most 8, the number of prompts",
        ),
        (
            lambda state: state["source"]["prompts"].update(returned=[3, "x"]),
            "prompts: returned: '1' is 'x', wanted an integer",
        ),
        (lambda state: state["source"]["prompts"].update(sources=[{}]), "prompts: sources[0] lacks 'epoch'"),
        (lambda state: state.update(before=[{"prompt": "x"}]), "state: before[0] lacks 'response'"),
        *[
            (
                lambda state, value=value: state.update(kl_coef=value),
                f"state: 'kl_coef' is {shown}, wanted a finite number",
            )
            for value, shown in [(math.nan, "nan"), (-math.inf, "-inf"), (10**400, "1" + 36 * "0" + "...")]
        ],
    ],
)
def test_a_state_that_lacks_something_is_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = changed(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        read_run(checkpoint)
    assert caught.value.message == f"{checkpoint}/checkpoint.json: {told}; resume from another checkpoint".replace(
        "checkpoint.json: source", "checkpoint.json: state: source"
    ).replace("checkpoint.json: prompts", "checkpoint.json: state: source: prompts")
    assert main(["export", str(checkpoint), str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err == f"corerl: error: {caught.value.message}\n"
