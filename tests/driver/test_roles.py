from __future__ import annotations

import pytest

from corerl.algorithms.schedules import learning_rate
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
