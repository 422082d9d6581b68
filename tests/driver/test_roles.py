from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from attrs import evolve

from corerl.config.schema import Config
from corerl.config.toml_text import to_plain
from corerl.driver.learning_rate import DecayStart, LearningRate
from corerl.driver.roles import Role, continue_schedules
from tests.driver.saved import make_config
from tests.driver.test_run import TRAIN, role

ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("decay", "warmup", "final", "rates"),
    [
        ("linear", 2, 0.2, [1.0, 2.0, 1.6, 1.2, 0.8, 0.4]),
        ("linear", 0, 0.5, [2.0, 1.5, 1.0]),
        ("cosine", 0, 0.0, [2.0, 1 + ROOT, 1.0, 1 - ROOT, 0.0]),
    ],
)
def test_rates_warm_up_and_decay_to_the_final_share(decay: str, warmup: int, final: float, rates: list[float]) -> None:
    given = {"warmup_steps": warmup, "decay": decay, "final_ratio": final, "peak": 2.0, "total_steps": len(rates)}
    rate = LearningRate(**given)  # type: ignore[arg-type]
    assert [rate.at(step) for step in range(len(rates))] == pytest.approx(rates)


# ---- resumed with another length -------------------------------------------------------------------------------------


def lines_of(step: int, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The lines about an actor at this optimizer step, with one step per rollout step and a peak of 0.004."""

    def config_with(parts: dict[str, Any]) -> Config:
        schedule = {"decay": "linear", "final_ratio": 0.25, **parts.get("schedule", {})}
        train = {"optimizer": {"lr": parts.get("lr", 0.004)}, "schedule": schedule}
        return make_config(run={"steps": parts["steps"]}, train=train)

    config = config_with(now)
    steps = config.train.schedule.steps or config.run.steps
    resumed = role("actor", config=config, rollout_steps=steps, next_optimizer_step=step)
    return continue_schedules({"config": to_plain(config_with(before)), "rollout_step": step}, [resumed])


@pytest.mark.parametrize(
    ("step", "before", "now", "line"),
    [
        # 0.004 falls to 0.001 in steps 0 to 9; of 41 steps, step 9 has done 9 / 40: 0.004 - 0.003 x 9 / 40.
        (9, {}, {"steps": 41}, "0.00333, not at 0.001; its schedule spans 41 rollout steps, not 10"),
        (9, {}, {"steps": 41, "schedule": {"steps": 10}}, None),
        (4, {"schedule": {"steps": 10}}, {"steps": 41, "schedule": {"steps": 10}}, None),
        (9, {}, {"lr": 0.008}, "0.002, not at 0.001"),
        (9, {"schedule": {"decay": "constant"}}, {"steps": 41, "schedule": {"decay": "constant"}}, None),
    ],
)
def test_a_rate_that_jumps_at_a_resume_is_reported(
    step: int, before: dict[str, Any], now: dict[str, Any], line: str | None
) -> None:
    lines = lines_of(step, {"steps": 10, **before}, {"steps": 10, **now})
    assert lines == ([f"actor: the learning rate continues at {line}"] if line else [])


def test_a_checkpoint_of_other_settings_or_roles_is_not_compared() -> None:
    actor = role("actor", config=make_config(train=TRAIN))
    assert continue_schedules({"config": {"no": {"such": "table"}}, "rollout_step": 0}, [actor]) == []
    state = {"config": to_plain(make_config()), "rollout_step": 0}
    assert continue_schedules(state, [evolve(actor, name="critic")]) == []


# ---- resumed with another number of steps per batch ------------------------------------------------------------------


def resumed_at(
    rollout_step: int, step: int, before: dict[str, Any], now: dict[str, Any], state: dict[str, Any] | None = None
) -> tuple[Role, Role, list[str]]:
    """The role before and after a resume that changes the `train` table, in a run of 40 rollout steps from a rate of 1
    to 0; and the lines about it."""

    def of(train: dict[str, Any]) -> Role:
        table = {"optimizer": {"lr": 1.0}, **train, "schedule": {"final_ratio": 0.0, **train.get("schedule", {})}}
        return role("actor", config=make_config(run={"steps": 40}, train=table), next_optimizer_step=step)

    earlier, later = of(before), of(now)
    earlier.decay_start = DecayStart(**state["schedules"]["actor"]) if state else None
    config = make_config(run={"steps": 40}, train=to_plain(earlier.train))
    lines = continue_schedules({"config": to_plain(config), "rollout_step": rollout_step, **(state or {})}, [later])
    return earlier, later, lines


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize(("before", "now"), [((1, 1), (4, 1)), ((4, 1), (1, 1)), ((2, 3), (2, 1)), ((2, 1), (1, 5))])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_rate_continues_with_other_mini_batches_or_epochs(
    decay: str, before: tuple[int, int], now: tuple[int, int], warmup: int
) -> None:
    schedule = {"decay": decay, "warmup_steps": warmup}
    tables = [{"mini_batches": m, "epochs": e, "schedule": schedule} for m, e in (before, now)]
    done = 10 * before[0] * before[1]
    earlier, later, lines = resumed_at(10, done, *tables)
    assert lines == []
    # Of the decay so much lies behind the resume, and it ends with the last step.
    share = (done - max(warmup - 1, 0)) / (40 * before[0] * before[1] - 1 - max(warmup - 1, 0))
    left = 30 * now[0] * now[1]
    behind = [share + (1 - share) * n / (left - 1) for n in range(left)]
    expected = [1 - each if decay == "linear" else (1 + math.cos(math.pi * each)) / 2 for each in behind]
    assert [later.lr.at(done + n) for n in range(left)] == pytest.approx(expected, abs=1e-12)
    assert later.lr.at(done) == earlier.lr.at(done)
    assert later.lr.at(done + left) == later.lr.at(done + left - 1) == pytest.approx(0.0)


def test_a_schedule_that_was_continued_once_is_continued_again() -> None:
    two, four, one = ({"mini_batches": n, "schedule": {"decay": "linear"}} for n in (2, 4, 1))
    _, second, _ = resumed_at(10, 20, two, four)
    state = {"schedules": {"actor": attrs.asdict(second.decay_start)}}
    earlier, same, lines = resumed_at(15, 40, four, four, state)
    assert lines == [] and same.decay_start == second.decay_start
    assert [same.lr.at(step) for step in range(40, 140)] == [second.lr.at(step) for step in range(40, 140)]
    _, third, lines = resumed_at(15, 40, four, one, state)
    assert lines == [] and third.lr.at(40) == second.lr.at(40) == earlier.lr.at(40)
    assert third.lr.at(40 + 24) == 0.0 < third.lr.at(40 + 23)
