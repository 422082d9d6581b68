"""Two groups worked out by hand, of the actor and of the critic."""

import numpy as np
import pytest
import torch

from corerl.algorithms.losses import LossInputs, clipped, value
from corerl.algorithms.ppo import CRITIC, PPO, SPEC, Options
from corerl.plugin.spec import ACTOR, RoleKind
from corerl.types import Output, SampleBatch
from tests.algorithms.ragged import Sample, step_of

# With gamma = lambda = 1/2; a reward comes with a sample's last loss token, and a prompt's samples are not compared.
# group   reward   value    delta                    A                       return    ratio
#   0       1       1/2     0 + 1/4 - 1/2 = -1/4     -1/4 + 1/8 = -1/8       3/8        1
#                   1/2     1 - 1/2 = 1/2            1/2                     1          2      clipped
#   0       0        1      -1                       -1                      0          1/2    clipped
#   1       3        2      0 + 1/2 - 2 = -3/2       -3/2 + 1/2 = -1         1          2
#           (a tool's token between them)
#                    1      3 - 1 = 2                2                       3          1/2
#   1       1        1      0                        0                       1          4
BATCH = SampleBatch(
    tokens=np.zeros(11, dtype=np.int64),
    offsets=np.array([0, 3, 5, 9, 11]),
    columns={
        "loss_mask": np.array([0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1], dtype=np.bool_),
        "values": np.array([9, 0.5, 0.5, 9, 1, 9, 2, 9, 1, 9, 1], np.float32),
    },
    rows={"group": np.array([0, 0, 1, 1])},
)
REWARDS = np.array([1, 0, 3, 1], np.float32)
ADVANTAGES = [-0.125, 0.5, -1, -1, 2, 0]
RETURNS = [0.375, 1, 0, 1, 3, 1]
RATIOS = [[1, 2], [0.5], [2, 0.5], [4]]
OPTIONS = {"gamma": 0.5, "gae_lambda": 0.5}


def test_advantages_of_two_groups_worked_by_hand() -> None:
    found = PPO(Options(**OPTIONS, whiten=False)).advantages(BATCH, REWARDS, np.zeros(11, np.float32))
    mask = BATCH.columns["loss_mask"]
    assert found.advantages[mask].tolist() == ADVANTAGES
    assert found.columns["returns"][mask].tolist() == RETURNS
    assert not found.advantages[~mask].any()
    errors = np.array(ADVANTAGES)  # a return less its value
    assert found.metrics["critic/explained_variance"] == pytest.approx(1 - errors.var() / np.var(RETURNS))

    whitened = PPO(Options(**OPTIONS)).advantages(BATCH, REWARDS, np.zeros(11, np.float32))
    # Of mean 1/16 and variance 6.265625 / 6 - 1/256.
    expected = (errors - 0.0625) / (6.265625 / 6 - 0.0625**2) ** 0.5
    assert whitened.advantages[mask].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert whitened.columns["returns"].tolist() == found.columns["returns"].tolist()


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
def test_the_actors_step_worked_by_hand(dual_clip: float) -> None:
    # min(r A, clip(r, 0.8, 1.2) A): -1/8; 0.6 (clipped); -0.8 (clipped); -2, or -1.5 with a dual clip of 3/2; 1; 0
    options = Options(dual_clip=dual_clip)
    parts = iter(ADVANTAGES)
    samples = [Sample(ratios=each, advantages=[next(parts) for _ in each], weight=1 / 6) for each in RATIOS]
    step = step_of(clipped, samples, **PPO(options).objectives()[ACTOR].loss.params)
    bounded = 1.5 if dual_clip else 2.0
    assert step.loss == pytest.approx(-(-0.125 + 0.6 - 0.8 - bounded + 1) / 6)
    assert step.gradients == [
        pytest.approx([0.125 / 6, 0]),
        [0],
        pytest.approx([0 if dual_clip else 2 / 6, -1 / 6]),
        [0],
    ]


def test_the_critics_step_worked_by_hand() -> None:
    # old value   new    bounded by 0.2    return    1/2 max of both squares
    #    1/2      1/2        1/2            3/8       1/2 (1/8)^2
    #    1/2       1         0.7             1        1/2 (0.3)^2            clipped, no gradient
    #     1        0         0.8             0        1/2 (0.8)^2            clipped, no gradient
    #     2        3         2.2             1        1/2 2^2
    #     1       1.1        1.1             3        1/2 (1.9)^2
    #     1        1          1              1        0
    old = BATCH.columns["values"][BATCH.columns["loss_mask"]]
    new = torch.tensor([0.5, 1, 0, 3, 1.1, 1], dtype=torch.float64, requires_grad=True)
    objective = PPO(Options()).objectives()[CRITIC]
    columns = {"weights": [1 / 6] * 6, "values": old, "returns": RETURNS}
    inputs = LossInputs(values=new, columns={name: torch.tensor(each).double() for name, each in columns.items()})
    loss = value(inputs, **objective.loss.params).loss  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == pytest.approx((0.125**2 + 0.3**2 + 0.8**2 + 2**2 + 1.9**2) / 12)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.125 / 6, 0, 0, 2 / 6, -1.9 / 6, 0])


def test_the_critic_passes_samples_first_and_begins_before_the_actor() -> None:
    assert SPEC.roles == {ACTOR: RoleKind.POLICY, CRITIC: RoleKind.CRITIC}
    algorithm = PPO(Options(warmup_steps=5))
    (asked,) = algorithm.forwards()
    assert (asked.role, asked.columns, asked.weights) == (CRITIC, {"values": Output.VALUES}, "")
    found = algorithm.objectives()
    assert {role: (each.loss.name, each.first_step) for role, each in found.items()} == {
        ACTOR: ("clipped", 5),
        CRITIC: ("value", 0),
    }
