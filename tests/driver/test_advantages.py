"""From rewards and the models' columns to what the losses read, against sums by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms.base import Advantages, Estimate
from corerl.algorithms.grpo import GRPO, GRPOOptions
from corerl.config.schema import AlgorithmConfig
from corerl.driver.advantages import TrainBatch, compute_advantages
from corerl.errors import DataError
from corerl.plugin.registry import Kind, load, load_implementation
from corerl.types import ROLE, TURN_REWARDS, FloatArray, SampleBatch
from corerl_algorithms.ppo import PPO
from corerl_algorithms.ppo import Options as OfPPO
from tests.marked import marked

REWARDS = np.array([1.0, 0.0], np.float32)


def batch(**columns: list[float]) -> SampleBatch:
    """Two samples of one prompt: a token of prompt, then one and two of response."""
    same = [0.0, -0.5, 0.0, -0.25, -0.125]
    given = {"old_logprobs": same, "rollout_logprobs": same, **columns}
    return marked(".x", ".xx", of_rows={"group": [0, 0], "response_length": [1, 2]}, **given)


COMPARED = GRPO(GRPOOptions(normalize_std=False)).advantages


def computed(
    samples: SampleBatch, estimate: Estimate = COMPARED, *, max_tokens: int = 4, **algorithm: object
) -> TrainBatch:
    config = AlgorithmConfig(**algorithm)  # type: ignore[arg-type]
    return compute_advantages(samples, REWARDS, estimate, config, max_tokens=max_tokens)


def advantages(found: TrainBatch) -> list[float]:
    return found.samples.columns["advantages"].tolist()


def test_without_a_loss_token_no_kl_is_measured() -> None:
    masked = batch(ref_logprobs=[0.0, -1.5, 0.0, -0.25, 0.125])
    masked = masked.with_columns(loss_mask=np.zeros(5, dtype=np.bool_))
    found = computed(masked, kl_coef=0.5, kl_estimator="k1")
    assert found.metrics == {"train/kl_coef": 0.5}


def test_ppo_subtracts_the_kl_from_each_token() -> None:
    columns = batch(ref_logprobs=[0.0, -1.5, 0.0, -1.25, 0.125], values=[0.0, 0.25, 0.0, 0.5, 0.75])
    critic = PPO(OfPPO(gamma=0.5, gae_lambda=0.5, whiten=False))
    found = computed(columns, critic.advantages, kl_coef=0.5, kl_estimator="k1", kl_in="reward")
    # Rewards of the tokens: 1 - 0.5; then -0.5 * 1 and 0 - 0.5 * -0.25.
    last = 0.125 - 0.75
    first = (-0.5 + 0.5 * 0.75 - 0.5) + 0.5 * 0.5 * last
    assert advantages(found) == pytest.approx([0.0, 0.25, 0.0, first, last])
    assert found.samples.columns["returns"] == pytest.approx([0.0, 0.5, 0.0, first + 0.5, last + 0.75])
    returns, values = np.array([0.5, first + 0.5, last + 0.75]), np.array([0.25, 0.5, 0.75])
    assert found.metrics["critic/explained_variance"] == pytest.approx(1 - (returns - values).var() / returns.var())


def test_a_correction_weights_advantages_by_the_ratio() -> None:
    columns = batch(rollout_logprobs=[0.0, -0.5 + math.log(2), 0.0, -0.25, -0.125 - math.log(3)])
    token = computed(columns, old_logprobs="recompute", correction="token", correction_cap=2.0)
    assert advantages(token) == pytest.approx([0.0, 0.25, 0.0, -0.5, -1.0])
    sequence = computed(columns, old_logprobs="recompute", correction="sequence", correction_cap=5.0)
    assert advantages(sequence) == pytest.approx([0.0, 0.25, 0.0, -1.5, -1.5])
    assert any(name.startswith("correction/") for name in token.metrics)
    masked = computed(
        columns, old_logprobs="recompute", correction="token", correction_cap=2.0, correction_beyond="mask"
    )
    assert advantages(masked) == pytest.approx([0.0, 0.25, 0.0, -0.5, 0.0])
    assert masked.metrics["correction/masked"] == pytest.approx(1 / 3)


def test_ratios_outside_the_band_give_advantages_of_zero() -> None:
    columns = batch(rollout_logprobs=[0.0, -1.5, 0.0, -1.25, -1.125])
    found = computed(columns, old_logprobs="recompute", correction="geometric", correction_beyond="mask")
    assert advantages(found) == [0.0] * 5
    assert found.samples.columns["loss_mask"].sum() == 3
    assert {name: value for name, value in found.metrics.items() if value} == {
        "correction/masked": 1.0,
        "correction/masked_samples": 1.0,
    }
    assert all(map(math.isfinite, found.metrics.values()))


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (Advantages(advantages=np.zeros(2, np.float32)), "the algorithm's 'advantages' are of shape [2], wanted [5]"),
        (Advantages(advantages=np.full(5, np.nan, np.float32)), "the algorithm's advantages are not finite"),
        (
            Advantages(advantages=np.zeros(5, np.float32), columns={"loss_mask": np.zeros(5, np.float32)}),
            "the algorithm returned the further column 'loss_mask', which the samples have; rename it",
        ),
    ],
)
def test_what_an_algorithm_may_not_return_is_told(found: Advantages, line: str) -> None:
    with pytest.raises(DataError) as caught:
        computed(batch(), lambda *_: found)
    assert caught.value.message.startswith(line)


def test_rewards_of_turns_are_credited_or_summed() -> None:
    # Sample 0 is an episode of turns of two and one tokens, sample 1 of one turn of two; each row begins with a prompt.
    zeros, turns = [0.0] * 8, [0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 4.0]
    values = np.array([0.0, 0.5, 0.25, 9.0, 0.125, 0.0, 1.0, 2.0], np.float32)
    columns = {"values": values, TURN_REWARDS: turns, "old_logprobs": zeros, "rollout_logprobs": zeros}
    given = marked(".xx.x", ".xx", of_rows={"group": [0, 0], "response_length": [3, 2]}, **columns)
    mask = given.columns["loss_mask"]

    def found(name: str, **options: object) -> list[float]:
        loaded = load(Kind.ALGORITHMS, name)
        algorithm = load_implementation(Kind.ALGORITHMS, loaded)(loaded.spec.config(**options))
        # 1 of the second reward is of no turn, as a bonus that `rollout.postprocess` gives.
        batch = compute_advantages(
            given,
            np.array([3.0, 5.0], np.float32),
            algorithm.advantages,
            AlgorithmConfig(),
            max_tokens=9,
            credits_turns=loaded.spec.credits_turns,
        )
        return batch.samples.columns["advantages"][mask].tolist()

    # A token has what its turn earns, and those behind it in its row.
    to_go = np.array([3.0, 3.0, 2.0, 5.0, 5.0])
    np.testing.assert_allclose(found("ppo", whiten=False), to_go - values[mask], rtol=1e-6)
    np.testing.assert_allclose(found("reinforce++"), (to_go - to_go.mean()) / to_go.std(), rtol=1e-5)
    for name in ("grpo", "reinforce++-baseline", "rloo"):
        summed = found(name)
        assert summed[0] == summed[1] == summed[2] < 0 < summed[3] == summed[4], name
    # One step and a value: the reward of a turn is seen by its last token alone.
    one_step = found("ppo", whiten=False, gae_lambda=0.0)
    np.testing.assert_allclose(one_step, [0.25 - 0.5, 1 + 0.125 - 0.25, 2 - 0.125, 2.0 - 1.0, 5 - 2.0], rtol=1e-6)


def two_roles(draw: np.random.Generator) -> tuple[SampleBatch, FloatArray]:
    """Two prompts with three episodes each, in which black has two rows of one reward, and did not play the last."""
    rows = [(number, role) for number in range(6) for role in ("white", "black", "black")][:-2]
    names = np.array([role for _, role in rows])
    episode = np.array([2 * number + (role == "black") for number, role in rows])
    lengths = draw.integers(2, 5, len(rows))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = ~np.isin(np.arange(offsets[-1]), offsets[:-1])  # the first token of a row is its prompt
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    samples = SampleBatch(
        tokens=np.arange(offsets[-1]),
        offsets=offsets,
        columns={
            "loss_mask": mask,
            "old_logprobs": logprobs,
            "rollout_logprobs": logprobs,
            "values": np.where(mask, draw.normal(size=len(mask)), 0.0).astype(np.float32),
        },
        row_columns={
            "group": np.array([number // 3 for number, _ in rows]),
            "response_length": lengths - 1,
            "episode": episode,
            ROLE: names,
        },
    )
    by_episode = draw.normal(size=12) + 10.0 * (np.arange(12) % 2)  # black earns more, whatever it does
    return samples, by_episode[episode].astype(np.float32)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++", "reinforce++-baseline", "ppo"])
def test_a_role_is_compared_with_itself_alone(name: str) -> None:
    samples, rewards = two_roles(np.random.default_rng(0))
    loaded = load(Kind.ALGORITHMS, name)
    estimate = load_implementation(Kind.ALGORITHMS, loaded)(loaded.spec.config()).advantages

    def made(samples: SampleBatch, rewards: FloatArray) -> TrainBatch:
        return compute_advantages(samples, rewards, estimate, AlgorithmConfig(), max_tokens=9)

    whole, roles, sums = made(samples, rewards), samples.row_columns[ROLE], Counter[str]()
    for role in ("white", "black"):
        rows = np.flatnonzero(roles == role)
        own = samples.take_rows(rows)
        own = evolve(own, row_columns={name: row for name, row in own.row_columns.items() if name != ROLE})
        alone = made(own, rewards[rows])
        for column in alone.samples.columns.keys() - own.columns.keys():
            found = whole.samples.take_rows(rows).columns[column]
            np.testing.assert_array_equal(found, alone.samples.columns[column])
        assert alone.samples.columns["advantages"].any()
        sums.update({metric: value * len(rows) / len(roles) for metric, value in alone.metrics.items()})
    assert whole.metrics == pytest.approx(dict(sums), rel=1e-6)


def test_one_role_of_all_samples_changes_no_number() -> None:
    plain = computed(batch())
    alone = computed(batch().with_row_columns(**{ROLE: np.array(["solver", "solver"])}))
    assert advantages(alone) == advantages(plain) and alone.metrics == plain.metrics
