from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from corerl.algorithms.schedules import learning_rate
from corerl.config.schema import Config
from corerl.config.toml_text import to_plain
from corerl.driver.roles import changed_rates
from tests.driver.saved import make_config
from tests.driver.test_run import TRAIN, role


def test_the_schedule_spans_every_optimizer_step_of_the_run() -> None:
    config = make_config(run={"steps": 5}, train=TRAIN)  # 5 x 2 mini-batches x 3 epochs: steps 0 to 29
    actor = role("actor", config=config)
    assert actor.step(0).lr == 1.0
    actor.next_optimizer_step = 29
    assert actor.step(4).lr == 0.0
    actor.next_optimizer_step = 10
    assert actor.step(1).lr == pytest.approx(19 / 29)


def test_a_later_roles_schedule_fits_the_steps_left() -> None:
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
        train = {"optimizer": {"lr": parts.get("lr", 0.004)}, "schedule": schedule, "epochs": parts.get("epochs", 1)}
        return make_config(run={"steps": parts["steps"]}, train=train)

    config = config_with(now)
    steps = config.train.schedule.steps or config.run.steps
    resumed = role("actor", config=config, rollout_steps=steps, next_optimizer_step=step)
    return [*changed_rates({"config": to_plain(config_with(before))}, [resumed])]


@pytest.mark.parametrize(
    ("step", "before", "now", "rates"),
    [
        # 0.004 falls to 0.001 in steps 0 to 9; of 41 steps, step 9 has done 9 / 40: 0.004 - 0.003 x 9 / 40.
        (
            9,
            {},
            {"steps": 41},
            ("0.00333", "0.001", "41 rollout steps of 1"),
        ),
        (9, {}, {"steps": 41, "schedule": {"steps": 10}}, None),
        (4, {"schedule": {"steps": 10}}, {"steps": 41, "schedule": {"steps": 10}}, None),
        (
            9,
            {},
            {"lr": 0.008},
            ("0.002", "0.001", "10 rollout steps of 1"),
        ),
        # Step 5 of 20: 0.004 - 0.003 x 5 / 19.
        (
            5,
            {},
            {"epochs": 2},
            ("0.00321", "0.00233", "10 rollout steps of 2"),
        ),
        (9, {"schedule": {"decay": "constant"}}, {"steps": 41, "schedule": {"decay": "constant"}}, None),
    ],
)
def test_a_rate_that_jumps_at_a_resume_is_reported(
    step: int, before: dict[str, Any], now: dict[str, Any], rates: tuple[str, str, str] | None
) -> None:
    lines = lines_of(step, {"steps": 10, **before}, {"steps": 10, **now})
    if rates is None:
        assert lines == []
    else:
        rate, was, spans = rates
        assert lines == [
            (
                f"actor: the learning rate continues at {rate}, not at {was}; its schedule spans {spans} optimizer "
                "steps, where it had 10 of 1"
            )
        ]


def test_a_checkpoint_of_other_settings_or_roles_is_not_compared() -> None:
    actor = role("actor", config=make_config(train=TRAIN))
    assert [*changed_rates({"config": {"no": {"such": "table"}}}, [actor])] == []
    assert [*changed_rates({"config": to_plain(make_config())}, [evolve(actor, name="critic")])] == []
