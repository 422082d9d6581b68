"""Advantages worked out by hand, with a tool's token between those of a sample."""

import numpy as np
import pytest

from corerl.algorithms.ppo import PPO, Options
from corerl.types import SampleBatch

# With gamma = lambda = 1/2; a reward comes with a sample's last loss token, and a prompt's samples are not compared.
# reward   value    delta                    A                       return
#   1       1/2     0 + 1/4 - 1/2 = -1/4     -1/4 + 1/8 = -1/8       3/8
#           1/2     1 - 1/2 = 1/2            1/2                     1
#   3        2      0 + 1/2 - 2 = -3/2       -3/2 + 1/2 = -1         1
#           (a tool's token between them)
#            1      3 - 1 = 2                2                       3
BATCH = SampleBatch(
    tokens=np.zeros(7, dtype=np.int64),
    offsets=np.array([0, 3, 7]),
    columns={
        "loss_mask": np.array([0, 1, 1, 0, 1, 0, 1], dtype=np.bool_),
        "values": np.array([9, 0.5, 0.5, 9, 2, 9, 1], np.float32),
    },
    rows={"group": np.array([0, 0])},
)


def test_advantages_and_returns_of_two_samples_worked_by_hand() -> None:
    rewards, nothing, mask = np.array([1, 3], np.float32), np.zeros(7, np.float32), BATCH.columns["loss_mask"]
    found = PPO(Options(gamma=0.5, gae_lambda=0.5, whiten=False)).advantages(BATCH, rewards, nothing)
    errors, returns = np.array([-0.125, 0.5, -1, 2]), [0.375, 1, 1, 3]
    assert found.advantages[mask].tolist() == errors.tolist() and not found.advantages[~mask].any()
    assert found.columns["returns"][mask].tolist() == returns
    assert found.metrics["critic/explained_variance"] == pytest.approx(1 - errors.var() / np.var(returns))
    whitened = PPO(Options(gamma=0.5, gae_lambda=0.5)).advantages(BATCH, rewards, nothing)
    expected = (errors - errors.mean()) / errors.std()
    assert whitened.advantages[mask].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert whitened.columns["returns"].tolist() == found.columns["returns"].tolist()
