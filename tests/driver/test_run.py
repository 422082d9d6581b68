from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import Config, EvalConfig
from corerl.data.plan import StepPlan
from corerl.data.prompts import Prompt
from corerl.driver import run as driver
from corerl.driver.advantages import Stamped
from corerl.driver.roles import Role
from corerl.driver.run import REFERENCE, Run, answers_in, meeting_at
from corerl.errors import CorerlError, DataError, WeightUpdateError, WorkerDied
from corerl.observability.timing import Phases
from corerl.plugin.events import Event, Notice, RunFinished, Shown, StepFinished
from corerl.plugin.hookspecs import hookimpl
from corerl.plugin.observers import Observers
from corerl.rollout.engine import Received
from corerl.rollout.sampler import Rollout
from corerl.rollout.sources import Evaluation, Scored
from corerl.trainer.assign import loss_of
from corerl.trainer.group import GroupTrainResult
from corerl.types import LossSpec, Metric, Output, ParallelLayout, SampleBatch, SleepResult, Step, UpdateResult
from corerl.weights.manifest import build_manifest
from corerl.weights.transport import Address
from tests.driver.saved import make_config

TRAIN = {
    "mini_batches": 2,
    "epochs": 3,
    "optimizer": {"lr": 1.0},
    "schedule": {"decay": "linear", "final_ratio": 0.0},
}


EXPERTS = Output.ROUTED_EXPERTS
CHOSEN = np.arange(5 * 3 * 2, dtype=np.int16).reshape(5, 3, 2)  # of 5 tokens, 3 layers, 2 experts


class Group:
    """Ranks and engines of a run, as far as the driver sees them; notes what is asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.losses: list[LossSpec] = []
        self.passes: list[tuple[tuple[Output, ...], str, bool]] = []  # outputs, weights, whether experts are replayed
        self.processes = self
        self.failure: Exception | None = None
        self.dead = False
        self.answers = True
        self.layouts = [ParallelLayout(rank=0, world_size=1, dp_rank=0, dp_size=1)]
        self.sent = UpdateResult(version=0, bytes=8, seconds=0.0, engines={"engine-0": "", "engine-1": ""})
        self.names = ("engine-0", "engine-1")
        self.fared = {name: Received(version=0, bytes=8) for name in self.names}  # in the update that comes next
        self.later: list[dict[str, Received]] = []  # in those after it; when they are used up, all goes well
        self.allowed = 10  # restarts
        self.verified: list[bool] = []  # update by update
        self.sums: dict[str, Any] = {}  # by engine

        self.slept = [SleepResult(freed_bytes=8, residual_bytes=0)]

    def weight_sums(self, dtype: str) -> dict[str, Any]:
        assert dtype == "float32"
        return self.sums

    def replace_dead(self) -> dict[str, WorkerDied]:
        self.log.append("replace")
        self.dead = False
        return {"engine-1": WorkerDied("its process died")}

    def wake_up(self) -> None:
        self.log.append("wake up")

    def sleep(self) -> list[SleepResult]:
        self.log.append("sleep")
        return self.slept

    def update_weights_async(self, address: Any, version: int, *, verify: bool) -> None:
        self.verified.append(verify)
        self.log.append(f"send {version}")

    def receive_async(self, manifest: Any, version: int, address: Any) -> None:
        self.log.append(f"receive {version}")

    def ready(self, pending: None, timeout: float) -> bool:
        return self.answers

    def wait_update(self, pending: None) -> UpdateResult:
        self._wait()
        return self.sent if self.verified[-1] else evolve(self.sent, sums={})

    def received(self, pending: None, timeout: float) -> dict[str, Received]:
        return self.fared if self.answers else {}

    def give_up(self, engine: str, reason: str) -> None:
        self.log.append(f"give up {engine}: {reason}")
        self.answers = True  # which is what it is for

    def replace(self, failed: Mapping[str, CorerlError]) -> None:
        for name, error in failed.items():
            if not self.allowed:
                raise error
            self.log.append(f"replace {name}: {type(error).__name__}: {error.message}")
            self.allowed -= 1
        well = {name: Received(version=0, bytes=8) for name in self.names}
        self.fared = self.later.pop(0) if self.later else well

    def lost_weights(self, names: Iterable[str]) -> None:
        self.without_weights = list(names)

    def step_completed(self) -> None:
        self.log.append("completed")

    def _wait(self) -> None:
        assert self.answers, "waited for in vain"
        if self.failure is not None:
            raise self.failure

    def forward_async(
        self, shared: Any, plan: Any, outputs: tuple[Output, ...], *, weights: str, replay: bool
    ) -> float:
        self.passes.append((outputs, weights, replay))
        return {Output.VALUES: 0.5, Output.LOGPROBS: -2.0 if weights == REFERENCE else -1.0}[outputs[0]]

    def wait_forward(self, value: float, outputs: tuple[Output, ...], *, of: SampleBatch) -> dict[Output, Any]:
        columns: dict[Output, Any] = {output: np.full(len(of.tokens), value, np.float32) for output in outputs}
        return columns | ({EXPERTS: CHOSEN} if EXPERTS in outputs else {})

    def train_async(self, shared: SampleBatch, plan: StepPlan, loss: LossSpec, step: Step) -> Step:
        self.losses.append(loss)
        return step

    def wait_train(self, step: Step) -> GroupTrainResult:
        self.log.append(f"train at {step.optimizer_step} of {step.rollout_step}")
        return GroupTrainResult(applied=True, metrics={}, grad_norm=float(step.optimizer_step), tokens=5)


LOSS = LossSpec(name="clipped", params={"kl_coef": 0.5})


def role(name: str, group: Group | None = None, config: Config | None = None, **parts: Any) -> Role:
    config = config or make_config()
    given = {"loss": LOSS, "optimizer_step": 0, "rollout_steps": config.run.steps, **parts}
    return Role(
        name=name,
        group=group or Group(),  # type: ignore[arg-type]  # the part of a TrainGroup that is used
        train=config.train,
        aggregation="token-mean",
        max_tokens=7,
        seed=0,
        **given,
    )


class Source:
    position = "where the prompts stand"

    def __init__(self) -> None:
        self.saved: list[Path] = []

    def save(self, checkpoint: Path) -> None:
        self.saved.append(checkpoint)


class Ears:
    def __init__(self) -> None:
        self.steps: list[StepFinished] = []
        self.finished: list[RunFinished] = []
        self.notices: list[Notice] = []

    @hookimpl
    def observe(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.steps.append(event)
        if isinstance(event, RunFinished):
            self.finished.append(event)
        if isinstance(event, Notice):
            self.notices.append(event)


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(driver, "share", lambda value: value)  # no object store

    def make(config: Config, *, actor: Group | None = None, **parts: Any) -> Run:
        needed = [each.name for each in attrs.fields(Run) if each.default is attrs.NOTHING]
        return Run(
            **{
                **dict.fromkeys(needed),
                "config": config,
                "observers": Observers([]),
                "phases": Phases(),
                "rollout_step": 0,
                "weights_version": 0,
                "sampler": "a sampler",
                "kl_coef": config.algorithm.kl_coef,
                "roles": {"actor": role("actor", actor, config)},
                **parts,
            }
        )

    return make


def batch() -> SampleBatch:
    """Two samples of one prompt: a token of prompt, then one and two of response."""
    return SampleBatch(
        tokens=np.arange(5),
        offsets=np.array([0, 2, 5]),
        columns={
            "loss_mask": np.array([False, True, False, True, True]),
            "rollout_logprobs": np.array([0.0, -0.5, 0.0, -0.25, -0.125], np.float32),
            "versions": np.array([0, 3, 0, 2, 3]),
        },
        rows={
            "group": np.array([0, 0]),
            "sample": np.arange(2),
            "response_length": np.array([1, 2]),
            "truncated": np.array([False, False]),
        },
    )


def scored() -> Scored:
    rollout = Rollout(batch=batch(), prompts=(Prompt(index=0, text="a", answer="b"),), texts=["b", "bb"])
    rewards = np.array([1.0, 0.0], np.float32)
    return Scored(step=4, rollout=rollout, rewards=rewards, exact_match=None, seconds={"rollout": 1.0})


# ---- learning rate ---------------------------------------------------------------------------------------------------


def test_the_learning_rate_that_is_reported_is_the_one_that_was_used_last(make_run: Callable[..., Run]) -> None:
    ears = Ears()
    config = make_config(run={"steps": 5}, train=TRAIN)  # 5 x 2 mini-batches x 3 epochs: steps 0 to 29
    run = make_run(config, observers=Observers([("ears", ears)]), rollout_step=5)
    result = GroupTrainResult(applied=True, metrics={"loss": Metric(1.0, 1.0)}, grad_norm=1.0, tokens=5)
    stamped = Stamped(samples=batch(), metrics={"correction/mean": 0.75})
    run.actor.optimizer_step = 30
    run.report(scored(), stamped, {"actor": [result] * 6})
    (event,) = ears.steps
    assert event.step == 4
    assert (event.metrics["train/lr"], event.metrics["time/rollout"]) == (0.0, 1.0)
    assert event.metrics["correction/mean"] == 0.75
    run.actor.optimizer_step = 1
    run.report(scored(), stamped, {"actor": [result]})
    assert ears.steps[1].metrics["train/lr"] == 1.0


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_old_logprobs_are_the_engines_where_nothing_is_recomputed(make_run: Callable[..., Run]) -> None:
    samples = make_run(make_config()).with_advantages(scored()).samples
    np.testing.assert_array_equal(samples.columns["old_logprobs"], batch().columns["rollout_logprobs"])
    assert "ref_logprobs" not in samples.columns
    # Rewards 1 and 0: centred 0.5 and -0.5; their standard deviation (that of a sample) is 0.5 ** 0.5.
    expected = 0.5 / 0.5**0.5
    assert samples.columns["advantages"] == pytest.approx([0.0, expected, 0.0, -expected, -expected], abs=1e-5)


def test_recomputed_and_reference_logprobs_stand_at_response_tokens_alone(make_run: Callable[..., Run]) -> None:
    config = make_config(algorithm={"old_logprobs": "recompute", "kl_coef": 0.1})
    columns = make_run(config).with_advantages(scored()).samples.columns
    assert columns["old_logprobs"].tolist() == [0.0, -1.0, 0.0, -1.0, -1.0]
    assert columns["ref_logprobs"].tolist() == [0.0, -2.0, 0.0, -2.0, -2.0]
    assert columns["old_logprobs"].dtype == columns["ref_logprobs"].dtype == np.float32


def with_experts() -> Scored:
    rollout = scored().rollout
    return evolve(scored(), rollout=evolve(rollout, batch=batch().with_columns(**{EXPERTS: CHOSEN + 100})))


def test_the_experts_of_old_logprobs_come_of_the_same_pass_and_are_every_tokens(make_run: Callable[..., Run]) -> None:
    actor = Group()
    algorithm = {"old_logprobs": "recompute", "routing_replay": "recompute", "kl_coef": 0.1}
    run = make_run(make_config(algorithm=algorithm), actor=actor)
    columns = run.with_advantages(with_experts()).samples.columns
    assert actor.passes == [((Output.LOGPROBS, EXPERTS), "", False), ((Output.LOGPROBS,), REFERENCE, False)]
    np.testing.assert_array_equal(columns["routed_experts"], CHOSEN)  # and not the engine's
    assert columns["routed_experts"].dtype == np.int16
    assert columns["old_logprobs"].tolist() == [0.0, -1.0, 0.0, -1.0, -1.0]


def test_old_logprobs_are_computed_through_the_engines_experts_where_these_are_trained(
    make_run: Callable[..., Run],
) -> None:
    actor = Group()
    algorithm = {"old_logprobs": "recompute", "routing_replay": "engine", "kl_coef": 0.1}
    run = make_run(make_config(algorithm=algorithm), actor=actor)
    columns = run.with_advantages(with_experts()).samples.columns
    assert actor.passes == [((Output.LOGPROBS,), "", True), ((Output.LOGPROBS,), REFERENCE, False)]
    np.testing.assert_array_equal(columns["routed_experts"], CHOSEN + 100)


def test_experts_that_nobody_asked_for_are_left_out(make_run: Callable[..., Run]) -> None:
    assert "routed_experts" not in make_run(make_config()).with_advantages(with_experts()).samples.columns


@pytest.mark.parametrize(
    ("rollout", "source"),
    [({"engine": "fake"}, "the engine 'fake'"), ({"saved": "runs/a"}, "the batches in 'runs/a'")],
)
def test_samples_without_the_engines_experts_end_the_run_in_one_line(
    make_run: Callable[..., Run], rollout: dict[str, Any], source: str
) -> None:
    run = make_run(make_config(algorithm={"routing_replay": "engine"}, rollout=rollout))
    with pytest.raises(DataError) as caught:
        run.with_advantages(scored())
    assert caught.value.message == (
        f"algorithm.routing_replay: 'engine', and {source} came without 'routed_experts'; set it to 'recompute' (with "
        "old_logprobs='recompute') or 'none', or take an engine that tells the experts of a token"
    )
    flat = batch().with_columns(**{EXPERTS: CHOSEN[:, 0]})
    with pytest.raises(DataError, match=r"'routed_experts' of .* is int16 \[5, 2\], wanted integers \[5, layers"):
        run.with_advantages(evolve(scored(), rollout=evolve(scored().rollout, batch=flat)))


def test_values_come_from_the_critic_alone(make_run: Callable[..., Run]) -> None:
    config = make_config(algorithm={"name": "ppo", "critic": {"whiten": False}}, roles={"critic": {}})
    roles = {"actor": role("actor"), "critic": role("critic")}
    columns = make_run(config, roles=roles).with_advantages(scored()).samples.columns
    assert columns["values"].tolist() == [0.0, 0.5, 0.0, 0.5, 0.5]
    # lambda and gamma are 1: the reward of the whole response, 1 and 0, less the value at each of its tokens.
    assert columns["returns"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert columns["advantages"].tolist() == [0.0, 0.5, 0.0, -0.5, -0.5]


def test_a_coefficient_is_adapted_to_the_kl_that_was_found_and_used_for_the_loss(make_run: Callable[..., Run]) -> None:
    algorithm = {"kl_coef": 0.5, "kl_target": 0.1, "kl_estimator": "k1", "kl_horizon": 20}
    actor = Group()
    run = make_run(make_config(algorithm=algorithm), actor=actor)
    stamped = run.with_advantages(scored())
    # The engine's log-probs are -0.5, -0.25 and -0.125, the reference's -2: far above the target, so up by a fifth of
    # 2 samples / 20.
    assert stamped.kl == pytest.approx((1.5 + 1.75 + 1.875) / 3)
    assert stamped.metrics["train/kl_coef"] == 0.5
    assert run.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 2 / 20))
    run.optimize(stamped)  # under the coefficient of this step; the adapted one is the next step's
    assert actor.losses == [evolve(LOSS, params={"kl_coef": 0.5})]
    run.kl_coef = 0.75
    run.optimize(run.with_advantages(scored()))
    assert actor.losses[1].params["kl_coef"] == 0.75


def test_cut_off_samples_are_left_out_where_they_are_to_be_masked(make_run: Callable[..., Run]) -> None:
    cut = evolve(scored(), rollout=evolve(scored().rollout, batch=batch().with_rows(truncated=np.array([False, True]))))
    kept = make_run(make_config()).with_advantages(cut).samples
    masked = make_run(make_config(algorithm={"overlong": "mask"})).with_advantages(cut).samples
    assert kept.columns["loss_mask"].tolist() == [False, True, False, True, True]
    assert masked.columns["loss_mask"].tolist() == [False, True, False, False, False]


def test_a_coefficient_that_is_taken_off_rewards_is_not_in_the_loss_too(make_run: Callable[..., Run]) -> None:
    algorithm = {"kl_coef": 0.5, "kl_target": 0.1, "kl_in": "reward"}
    actor, config = Group(), make_config(algorithm=algorithm)
    run = make_run(config, roles={"actor": role("actor", actor, config, loss=loss_of("actor", config))})
    run.optimize(run.with_advantages(scored()))
    assert [loss.params["kl_coef"] for loss in actor.losses] == [0.0]


def test_a_step_without_a_loss_token_is_passed_over(make_run: Callable[..., Run]) -> None:
    ears, actor = Ears(), Group()
    run = make_run(make_config(algorithm={"overlong": "mask"}), actor=actor, observers=Observers([("ears", ears)]))
    cut = batch().with_rows(truncated=np.array([True, True]))
    stamped = run.with_advantages(evolve(scored(), rollout=evolve(scored().rollout, batch=cut)))
    assert run.optimize(stamped) == {} and actor.losses == []
    assert told(ears) == ["step 0 is passed over: none of its samples has a loss token"]


def test_a_mini_batch_without_a_loss_token_moves_nothing_and_is_told(make_run: Callable[..., Run]) -> None:
    ears, config = Ears(), make_config(algorithm={"overlong": "mask"}, train={"mini_batches": 2, "epochs": 3})
    actor = role("actor", config=config)
    run = make_run(config, roles={"actor": actor}, observers=Observers([("ears", ears)]))
    cut = batch().with_rows(truncated=np.array([False, True]), group=np.array([0, 1]))
    results = run.optimize(run.with_advantages(evolve(scored(), rollout=evolve(scored().rollout, batch=cut))))
    assert [each.grad_norm for each in results["actor"]] == [0.0, 1.0, 2.0]  # the numbers of the steps that were done
    assert actor.optimizer_step == 3
    assert told(ears) == ["step 0: 3 optimizer steps of actor are left out: no sample in them has a loss token"]


def test_a_stop_is_heeded_where_engines_have_new_weights(make_run: Callable[..., Run]) -> None:
    run = make_run(make_config(weights={"every": 3}, checkpoint={"every": 0}), stop=Stop(True))
    assert [step for run.rollout_step, step in enumerate(range(7)) if run.stopping] == [0, 3, 6]
    run.stop = Stop(False)
    assert not run.stopping
    saved = {"every": 3}
    without = make_run(make_config(run={"mode": "train-only"}, weights=saved, checkpoint={"every": 0}), stop=Stop(True))
    assert all(without.stopping for without.rollout_step in range(4))  # there are no engines


# ---- optimizer steps -------------------------------------------------------------------------------------------------


def test_each_role_takes_its_own_steps_and_results_come_in_their_order(make_run: Callable[..., Run]) -> None:
    config = make_config(train={"epochs": 3})
    roles = {"actor": role("actor", config=config), "critic": role("critic", config=config, optimizer_step=10)}
    run = make_run(config, roles=roles, rollout_step=4)
    results = run.optimize(run.with_advantages(scored()))
    assert {name: [each.grad_norm for each in steps] for name, steps in results.items()} == {
        "actor": [0.0, 1.0, 2.0],
        "critic": [10.0, 11.0, 12.0],
    }
    assert [each.optimizer_step for each in roles.values()] == [3, 13]


def test_the_actor_waits_until_the_critic_is_warm(make_run: Callable[..., Run]) -> None:
    actor, fleet = Group(), Group()
    roles = {"actor": role("actor", actor, first_step=2), "critic": role("critic")}
    run = make_run(make_config(), roles=roles, fleet=fleet, weights_version=3)
    run.push_weights()
    stamped = run.with_advantages(scored())
    for run.rollout_step in range(4):
        trained = list(run.optimize(stamped))
        assert trained == (["critic"] if run.rollout_step < 2 else ["actor", "critic"])
        run.push_weights()
    # Weights that no step has changed are not sent again.
    assert actor.log == ["send 3", "train at 0 of 2", "send 4", "train at 1 of 3", "send 5"]


# ---- warnings --------------------------------------------------------------------------------------------------------


def told(ears: Ears) -> list[str]:
    return [notice.text for notice in ears.notices]


def test_a_reward_that_never_differs_is_told_once_until_it_does(make_run: Callable[..., Run]) -> None:
    ears = Ears()
    run = make_run(make_config(), observers=Observers([("ears", ears)]))
    same = evolve(scored(), rewards=np.array([0.25, 0.25], np.float32))
    line = (
        "every sample of the last 3 steps had the reward 0.25: nothing is learned from that; "
        "look at reward.name, data.answer_key, and what is sampled"
    )
    for expected in (0, 0, 1, 1):
        run.report(same, None, {})
        assert told(ears) == [line] * expected
    run.report(scored(), None, {})
    for _ in range(3):
        run.report(same, None, {})
    assert told(ears) == [line] * 2


def test_the_first_sample_without_a_reward_is_named(make_run: Callable[..., Run]) -> None:
    ears = Ears()
    run = make_run(make_config(), observers=Observers([("ears", ears)]))
    failed = evolve(scored(), failures={"timeout": 2, "died": 1}, first_failure="reward 'mine:f' took 30 s on 'a'")
    run.report(failed, None, {})
    assert told(ears) == ["step 4: 3 samples failed; the first: reward 'mine:f' took 30 s on 'a'"]
    assert ears.steps[0].metrics["reward/failed"] == 3.0


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_each_push_has_a_version_of_its_own(make_run: Callable[..., Run]) -> None:
    actor, fleet = Group(), Group()
    run = make_run(make_config(), actor=actor, fleet=fleet, weights_version=7)
    run.push_weights()
    run.actor.optimizer_step += 1
    run.push_weights()
    assert (actor.log, fleet.log, run.weights_version) == (["send 7", "send 8"], ["receive 7", "receive 8"], 9)


def test_a_push_that_an_engine_did_not_take_says_which_and_why(make_run: Callable[..., Run]) -> None:
    actor, fleet = Group(), Group()
    # The engine knows better than the sender, which only sees that no answer comes.
    actor.sent = evolve(actor.sent, engines={"engine-0": "", "engine-1": "no answer"})
    fleet.fared["engine-1"] = Received(version=0, bytes=0, error="bucket 3 was damaged")
    run = make_run(make_config(), actor=actor, fleet=fleet, weights_version=7)
    with pytest.raises(
        WeightUpdateError, match="^weights version 7 did not reach every engine: engine-1: bucket 3 was damaged$"
    ):
        run.push_weights()


def test_a_push_ends_with_a_rank_that_died_and_waits_for_no_engine(make_run: Callable[..., Run]) -> None:
    actor, fleet = Group(), Group()
    actor.failure = WorkerDied("its process died")
    fleet.answers = False
    run = make_run(make_config(), actor=actor, fleet=fleet, weights_version=7)
    with pytest.raises(WorkerDied, match="^its process died$"):
        run.push_weights()


DEAD = Received(version=-1, bytes=0, error="its process died", died=True)
FAILED = Received(version=0, bytes=0, error="bucket 3 did not arrive")


def evicting(make_run: Callable[..., Run], *fared: dict[str, Received], **parts: Any) -> tuple[Run, Group, Group, Ears]:
    """A run whose engines fare so, update after update; each has taken the first one."""
    actor, fleet, ears = Group(), Group(), Ears()
    observers = Observers([("ears", ears)])
    address = Address(transport="ipc", engines=fleet.names, token="at first")
    run = make_run(make_config(), actor=actor, fleet=fleet, address=address, observers=observers, **parts)
    run.push_weights()
    run.actor.optimizer_step += 1
    well = {name: Received(version=0, bytes=8) for name in fleet.names}
    fleet.fared, *fleet.later = [{**well, **each} for each in fared]
    for group in (actor, fleet):
        group.log.clear()
    return run, actor, fleet, ears


def test_an_engine_that_dies_in_an_update_is_given_up_and_replaced_and_all_get_the_next_one(
    make_run: Callable[..., Run],
) -> None:
    run, actor, fleet, ears = evicting(make_run, {"engine-0": FAILED, "engine-1": DEAD})
    actor.answers = False  # the senders wait, until they are told
    run.push_weights()
    assert actor.log == [
        "send 1",
        "give up engine-0: bucket 3 did not arrive",
        "give up engine-1: its process died",
        "send 2",
    ]
    # What the other engine says follows from the death of the one: it stays.
    assert fleet.log == ["receive 1", "replace engine-1: WorkerDied: its process died", "receive 2"]
    assert run.weights_version == 3
    assert run.address.token != "at first"  # what was built there is broken
    assert told(ears) == ["engine-1 is replaced: its process died"]


def test_an_engine_that_fails_alive_is_replaced_and_if_its_successor_fails_too_the_run_ends(
    make_run: Callable[..., Run],
) -> None:
    run, _, fleet, _ = evicting(make_run, {"engine-1": FAILED})
    run.push_weights()
    assert fleet.log == [
        "receive 1",
        "replace engine-1: WeightUpdateError: engine-1: bucket 3 did not arrive",
        "receive 2",
    ]
    run, _, fleet, _ = evicting(make_run, {"engine-1": FAILED}, {"engine-1": FAILED})
    with pytest.raises(
        WeightUpdateError, match="^weights version 2 did not reach every engine: engine-1: bucket 3 did not arrive$"
    ):
        run.push_weights()
    assert len(fleet.log) == 3


def test_an_engine_that_died_more_often_than_is_allowed_ends_the_run_with_its_death(
    make_run: Callable[..., Run],
) -> None:
    run, _, fleet, _ = evicting(make_run, *[{"engine-1": DEAD}] * 3)
    fleet.allowed = 2
    with pytest.raises(WorkerDied, match="^its process died$"):
        run.push_weights()
    assert [line for line in fleet.log if line.startswith("receive")] == ["receive 1", "receive 2", "receive 3"]


def test_an_engine_whose_senders_missed_it_is_replaced_though_it_says_nothing(make_run: Callable[..., Run]) -> None:
    run, actor, fleet, _ = evicting(make_run, {})
    late = actor.sent
    actor.sent = evolve(late, engines={"engine-0": "", "engine-1": "no answer"})
    replace = fleet.replace
    fleet.replace = lambda failed: (replace(failed), setattr(actor, "sent", late))[0]  # type: ignore[method-assign]
    run.push_weights()
    assert fleet.log[1] == "replace engine-1: WeightUpdateError: engine-1: no answer"


def test_what_engines_hold_is_compared_every_so_many_updates_and_the_tensor_is_named(
    make_run: Callable[..., Run],
) -> None:
    actor, fleet, ears = Group(), Group(), Ears()
    observers = Observers([("ears", ears)])
    manifest = build_manifest([("a", (1,)), ("b", (1,))], dtype="float32", bucket_bytes=8)
    config = make_config(weights={"verify_every": 2})
    run = make_run(config, actor=actor, fleet=fleet, observers=observers, manifest=manifest)
    actor.sent = evolve(actor.sent, sums={"a": 5, "b": 6})
    fleet.sums = {"engine-0": {"a": 5}, "engine-1": None}  # of b it does not tell
    for _ in range(4):
        run.push_weights()
        run.actor.optimizer_step += 1
    assert actor.verified == [True, False, True, False]
    line = "engine-1 cannot tell what it has loaded (Engine.weight_sums): it is not compared with what was sent; "
    assert told(ears) == [f"{line}weights.verify_every=0 asks no more"]
    fleet.sums = {"engine-0": {"a": 5, "b": 6}, "engine-1": {"a": 5, "b": 7}}
    with pytest.raises(
        WeightUpdateError,
        match="^engine-1 holds other weights than it was sent as version 4: 'b', whose bits sum to 0x7 ",
    ):
        run.push_weights()


def test_restarts_are_counted_anew_after_a_step(make_run: Callable[..., Run]) -> None:
    fleet = Group()
    run = make_run(make_config(), fleet=fleet)
    run.report(scored(), None, {})
    assert fleet.log == ["completed"]


def test_a_batch_is_as_stale_as_its_tokens_are_behind_the_weights_that_are_trained(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(make_config(), fleet=Group(), weights_version=5)  # the engines hold 4
    metrics = run.with_advantages(scored()).metrics
    assert (metrics["rollout/staleness"], metrics["rollout/staleness_max"]) == (pytest.approx(4 / 3), 2.0)
    read = make_run(make_config(), weights_version=5)  # nothing is sampled: versions are another run's
    assert not any("staleness" in name for name in read.with_advantages(scored()).metrics)


class Overlapping(Source):
    """A source that samples while something is trained; notes where an update stands."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        self.log.append(f"hold for {version}")
        yield
        self.log.append("go on")


def test_an_update_comes_to_engines_that_are_still_and_new_ones_stand_where_some_have_died(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, ears = Group(), Ears()
    monkeypatch.setattr(driver, "meeting_at", lambda address, group: "another place")
    run = make_run(
        make_config(rollout={"source": "one-step-off", "prompts": 8, "samples": 4}),
        actor=together,
        fleet=together,
        source=Overlapping(together.log),
        observers=Observers([("ears", ears)]),
        weights_version=7,
    )
    run.push_weights()
    assert together.log == ["hold for 7", "send 7", "receive 7", "go on"]
    together.log.clear()
    together.dead = True  # so that there is something to send, though nothing has been trained
    run.push_weights()
    assert together.log == ["hold for 8", "replace", "send 8", "receive 8", "go on"]
    assert (run.address, told(ears)) == ("another place", ["engine-1 is replaced: its process died"])


def test_weights_go_out_every_so_many_steps_and_before_an_evaluation(make_run: Callable[..., Run]) -> None:
    actor = Group()
    config = make_config(weights={"every": 3}, eval={"every": 4}, run={"steps": 7})
    run = make_run(config, actor=actor, fleet=Group(), rollout_step=1)  # resumed: engines hold nothing yet
    pushed = []
    for run.rollout_step in range(1, 8):
        before = len(actor.log)
        run.push_weights()
        pushed += [run.rollout_step] if len(actor.log) > before else []
        run.actor.optimizer_step += 1
    assert pushed == [1, 3, 4, 6, 7]


def test_ranks_and_engines_that_share_devices_take_turns(make_run: Callable[..., Run]) -> None:
    together = Group()  # one log, so that the order between the two shows
    run = make_run(make_config(), actor=together, fleet=together, offloaded=["actor"])
    with run.training():
        together.log.append("train")
        run.push_weights()
    assert together.log == ["sleep", "wake up", "train", "wake up", "send 0", "receive 0", "sleep"]
    alone = Group()
    with make_run(make_config(), actor=alone, fleet=alone).training():
        pass
    assert alone.log == []


def test_what_a_rank_says_of_its_sleep_reaches_the_user(make_run: Callable[..., Run]) -> None:
    actor, ears = Group(), Ears()
    actor.slept = [evolve(actor.slept[0], notes=notes) for notes in ((), ("host memory could not be pinned",))]
    run = make_run(
        make_config(), actor=actor, fleet=Group(), offloaded=["actor"], observers=Observers([("ears", ears)])
    )
    with run.training():
        pass
    assert [notice.text for notice in ears.notices] == ["actor rank 1: host memory could not be pinned"]


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (EvalConfig(every=3), [0, 3, 6, 7]),
        (EvalConfig(every=3, at_start=False), [3, 6, 7]),
        (EvalConfig(every=10), [0, 7]),
        (EvalConfig(every=0), []),
    ],
)
def test_evaluation_is_due_at_the_start_at_multiples_and_at_the_end(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, config: EvalConfig, steps: list[int]
) -> None:
    evaluated: list[int] = []

    def evaluate(*_: Any, **__: Any) -> Evaluation:
        evaluated.append(run.rollout_step)
        return Evaluation(metrics={"eval/reward": 0.5}, shown=())

    monkeypatch.setattr(driver, "evaluate", evaluate)
    run = make_run(evolve(make_config(run={"steps": 7}), eval=config), held_out=["a prompt"])
    for step in range(8):
        run.rollout_step = step
        run.evaluate()
    assert evaluated == steps


# ---- the end ---------------------------------------------------------------------------------------------------------


class Saves:
    """Checkpoints of a run: the newest one begun, and what more was asked."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self.newest: Path | None = Path("/run/checkpoints/newest")
        self.log: list[tuple[str, bool]] = []
        self.states: list[dict[str, Any]] = []

    def start(self, step: Any, state: dict[str, Any], *, background: bool, files: Callable[[Path], None]) -> None:
        files(Path("/run/checkpoints/partial"))
        self.states.append(state)
        self.log.append((f"start {state['rollout_step']}", background))

    def complete(self, *, wait: bool) -> None:
        self.log.append(("complete", wait))


class Stop:
    def __init__(self, requested: bool) -> None:
        self.requested = requested


def test_the_end_saves_what_is_not_saved_and_waits_for_what_is_being_written(make_run: Callable[..., Run]) -> None:
    for last_step, log in (
        (4, [("start 5", False), ("complete", True)]),
        (5, [("complete", True)]),
    ):
        saves, source = Saves(last_step), Source()
        run = make_run(
            make_config(), checkpoints=saves, rollout_step=5, stop=Stop(True), source=source, run_dir=Path("/run")
        )
        summary = run.finish()
        assert saves.log == log
        assert len(source.saved) == (last_step == 4)  # beside the roles' files
        # Interrupted, so nothing is exported.
        assert (summary.reason, summary.steps_done, summary.run_dir) == ("interrupted", 5, Path("/run"))


def test_the_last_save_wakes_ranks_where_engines_sleep(make_run: Callable[..., Run]) -> None:
    together = Group()
    run = make_run(
        make_config(),
        actor=together,
        fleet=together,
        offloaded=["actor"],
        checkpoints=Saves(4),
        rollout_step=5,
        stop=Stop(True),
        source=Source(),
        run_dir=Path("/run"),
    )
    run.finish()
    assert together.log == ["sleep", "wake up"]


@pytest.mark.parametrize(("rollout_step", "reason"), [(4, "interrupted"), (5, "finished")])
def test_a_request_to_stop_in_the_last_step_interrupts_nothing(
    make_run: Callable[..., Run], rollout_step: int, reason: str
) -> None:
    config = make_config(run={"steps": 5}, checkpoint={"export": False})
    run = make_run(config, checkpoints=Saves(rollout_step), rollout_step=rollout_step, stop=Stop(True), run_dir=Path())
    assert run.finish().reason == reason


def test_a_resumed_run_ends_with_the_answers_from_before_any_training(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(response: str) -> tuple[Shown, ...]:
        return (Shown(prompt="a", response=response, answer="b", reward=0.5),)

    def evaluating(response: str, **parts: Any) -> tuple[Run, Saves, Ears]:
        monkeypatch.setattr(driver, "evaluate", lambda *_, **__: Evaluation(metrics={}, shown=answers(response)))
        saves, ears = Saves(-1), Ears()
        observers = Observers([("ears", ears)])
        common = {"held_out": ["a prompt"], "source": Source(), "stop": Stop(True), "run_dir": Path("/run")}
        run = make_run(make_config(), checkpoints=saves, observers=observers, **common, **parts)
        run.evaluate()
        run.finish()
        return run, saves, ears

    _, saves, _ = evaluating("at first")
    (state,) = saves.states
    restored = answers_in(json.loads(json.dumps(state)))
    _, saves, ears = evaluating("at the resume", before=restored, rollout_step=25)
    assert (ears.finished[0].before, ears.finished[0].after) == (answers("at first"), answers("at the resume"))
    assert answers_in(saves.states[0]) == answers("at first")


def test_where_no_update_comes_by_itself_engines_that_have_died_are_mended_and_others_left_alone(
    make_run: Callable[..., Run],
) -> None:
    actor, fleet = Group(), Group()
    run = make_run(make_config(), actor=actor, fleet=fleet, address=Address(transport="disk", engines=fleet.names))
    run.push_weights()
    fleet.log.clear()
    run.mend_engines()
    assert fleet.log == []
    fleet.dead = True
    run.mend_engines()
    assert fleet.log == ["replace", "receive 1"]


def test_senders_and_engines_meet_anew_at_names_that_nobody_else_has(make_run: Callable[..., Run]) -> None:
    for transport in ("ipc", "disk", "delta"):
        address = Address(transport=transport, engines=("engine-0",), token="old")
        tokens = {meeting_at(address, make_run(make_config()).actor.group).token for _ in range(3)}
        assert len(tokens) == 3 and "old" not in tokens
