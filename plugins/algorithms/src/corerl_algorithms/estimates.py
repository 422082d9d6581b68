"""Advantages and returns of single tokens, from token rewards and a critic's values."""

from __future__ import annotations

import numpy as np

from corerl.algorithms import differ
from corerl.types import BoolArray, FloatArray, IntArray, SampleBatch

STD_EPS = 1e-6  # as in `corerl.algorithms.group_advantages`


def at_last_token(per_sample: FloatArray, batch: SampleBatch) -> FloatArray:
    """[N] each sample's number from [B] at its last loss token, 0 elsewhere.

    r_t = r for the last t, 0 before: the reward for a whole response is earned with the token that ends it (Ouyang et
    al. 2022, "Training language models to follow instructions with human feedback", section 3.5).
    """
    steps, bounds = _steps(batch)
    chosen = np.diff(bounds) > 0
    per_token = np.zeros(len(batch.tokens), dtype=np.float32)
    per_token[steps[bounds[1:][chosen] - 1]] = np.asarray(per_sample)[chosen]
    return per_token


def gae(
    rewards: FloatArray, values: FloatArray, batch: SampleBatch, *, gamma: float, lam: float
) -> tuple[FloatArray, FloatArray]:
    """Advantages and returns by generalized advantage estimation, each [N] and 0 outside loss tokens.

        delta_t = r_t + gamma V_t+1 - V_t
        A_t     = delta_t + gamma lam A_t+1                     Schulman et al. 2016, "High-Dimensional Continuous
        R_t     = A_t + V_t                                     Control Using Generalized Advantage Estimation", eq. 16

    R is the critic's target, as in PPO (Schulman et al. 2017). Only loss tokens are steps: t + 1 is the next loss token
    of the same sample, however many environment tokens are in between. After the last one V and A are 0, whether the
    sample ended or was truncated. Rewards and values at other tokens are not read.

        rewards: [N] for choosing each token
        values: [N] of the state before each token is chosen, as `Output.VALUES`
        gamma, lam: discount, and the weight of later steps (0: one step and a value, 1: whole returns), in [0, 1]
    """
    steps, bounds = _steps(batch)
    longest_first = np.argsort(-np.diff(bounds), kind="stable")
    lengths, last = np.diff(bounds)[longest_first], bounds[1:][longest_first] - 1
    advantages = np.zeros(len(batch.tokens), dtype=np.float32)
    returns = np.zeros(len(batch.tokens), dtype=np.float32)
    next_value = np.zeros(len(batch))
    advantage = np.zeros(len(batch))
    # From the last step back, in all samples at once: the first `active` samples have a step this far back.
    steps_back = np.arange(lengths.max(initial=0))
    for back, active in enumerate(np.searchsorted(-lengths, -steps_back).tolist()):
        at = steps[last[:active] - back]
        value = values[at].astype(np.float64)
        delta = rewards[at] + gamma * next_value[:active] - value
        advantage = delta + gamma * lam * advantage[:active]
        advantages[at], returns[at] = advantage, advantage + value
        next_value = value
    return advantages, returns


def whiten(advantages: FloatArray, loss_mask: BoolArray) -> FloatArray:
    """[N] advantages normalized to mean 0 and standard deviation 1 over all loss tokens, exactly 0 elsewhere.

        (A_t - mean(A)) / (std(A) + 1e-6)

    As in OpenAI Baselines' PPO2, studied in Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients".
    Advantages that are all equal within rounding say nothing about better or worse, and become 0.
    """
    chosen = advantages[loss_mask].astype(np.float64)
    whitened = np.zeros(len(advantages), dtype=np.float32)
    if len(chosen) and differ(chosen.min(), chosen.max()):
        whitened[loss_mask] = (chosen - chosen.mean()) / (chosen.std() + STD_EPS)
    return whitened


def explained_variance(values: FloatArray, returns: FloatArray, loss_mask: BoolArray) -> float:
    """1 - Var(R - V) / Var(R) over loss tokens: 1 is a perfect critic, 0 is no better than a constant, and negative is
    worse than a constant. 0 if all returns are equal, since there is no variance to explain."""
    target = returns[loss_mask].astype(np.float64)
    if not len(target) or target.min() == target.max():
        return 0.0
    return float(1.0 - (target - values[loss_mask]).var() / target.var())


def _steps(batch: SampleBatch) -> tuple[IntArray, IntArray]:
    """Indices of the loss tokens, and bounds [B + 1]: sample b has steps[bounds[b]:bounds[b + 1]]."""
    steps = np.flatnonzero(batch.columns["loss_mask"])
    return steps, np.searchsorted(steps, batch.offsets)
