from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from corerl.algorithms.schedules import learning_rate
from corerl.config.load import to_plain
from corerl.config.schema import Config
from corerl.driver.roles import changed_rates
from tests.driver.saved import make_config
from tests.driver.test_run import TRAIN, role


def test_the_schedule_spans_every_optimizer_step_of_the_run() -> None:
    config = make_config(run={"steps": 5}, train=TRAIN)  # 5 x 2 mini-batches x 3 epochs: steps 0 to 29
    actor = role("actor", config=config)
    assert actor.step(0).lr == 1.0
    actor.optimizer_step = 29
    assert actor.step(4).lr == 0.0
    actor.optimizer_step = 10
    assert actor.step(1).lr == pytest.approx(19 / 29)


def test_a_role_that_begins_later_has_its_whole_schedule_in_what_is_left() -> None:
    config = make_config(run={"steps": 5}, train=TRAIN)
    late = role("actor", config=config, first_step=3)  # 2 x 2 x 3 steps
    expected = learning_rate(warmup_steps=0, decay="linear", final_ratio=0.0, peak=1.0, step=4, total_steps=12)
    assert late.lr(4) == expected == pytest.approx(7 / 11)
    assert late.lr(11) == 0.0


# ---- resumed with another length -------------------------------------------------------------------------------------


def lines_of(step: int, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is told of an actor at this optimizer step, with one step per rollout step and a peak of 0.004."""

    def config_with(parts: dict[str, Any]) -> Config:
        schedule = {"decay": "linear", "final_ratio": 0.25, **parts.get("schedule", {})}
        return make_config(
            run={"steps": parts["steps"]},
            train={"optimizer": {"lr": parts.get("lr", 0.004)}, "schedule": schedule},
        )

    config = config_with(now)
    steps = config.train.schedule.steps or config.run.steps
    resumed = role("actor", config=config, rollout_steps=steps, optimizer_step=step)
    return changed_rates(to_plain(config_with(before)), [resumed])


def test_raising_the_steps_of_a_run_tells_both_learning_rates_and_how_to_keep_the_old() -> None:
    # 0.004 falls to 0.001 in steps 0 to 9; of 41 steps, step 9 has done 9 / 40: 0.004 - 0.003 x 9 / 40.
    assert lines_of(9, {"steps": 10}, {"steps": 41}) == [
        (
            "actor: the learning rate goes on at 0.00333, not at 0.001, because the schedule spans 41 rollout steps, "
            "not 10; set train.schedule.steps=10 to keep it"
        )
    ]


def test_a_schedule_with_a_length_of_its_own_stays_where_the_run_is_made_longer() -> None:
    own = {"schedule": {"steps": 10}}
    assert lines_of(12, {"steps": 10}, {"steps": 41, **own}) == []
    assert lines_of(4, {"steps": 10, **own}, {"steps": 41, **own}) == []
    (line,) = lines_of(9, {"steps": 20, **own}, {"steps": 20, "schedule": {"steps": 19}})
    assert line.startswith("actor: the learning rate goes on at 0.0025, not at 0.001, because ")
    assert line.endswith("spans 19 rollout steps, not 10; set train.schedule.steps=10 to keep it")


def test_other_changes_of_the_rate_are_told_without_that_cure_and_a_constant_one_is_silent() -> None:
    assert lines_of(9, {"steps": 10}, {"steps": 10, "lr": 0.008}) == [
        "actor: the learning rate goes on at 0.002, not at 0.001"
    ]
    constant = {"schedule": {"decay": "constant"}}
    assert lines_of(9, {"steps": 10, **constant}, {"steps": 41, **constant}) == []


def test_a_checkpoint_of_other_settings_or_roles_is_not_compared() -> None:
    actor = role("actor", config=make_config(train=TRAIN))
    assert changed_rates({"no": {"such": "table"}}, [actor]) == []
    assert changed_rates(to_plain(make_config()), [evolve(actor, name="critic")]) == []
