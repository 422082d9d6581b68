"""AdamW against its formula in float64, and its state when it is made, moved and taken up again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.backend.optimizer import adamw, set_adam, step_scaled
from corerl.config.schema import OptimizerConfig
from corerl.ops.clip import clip_factor
from corerl.types import Array

CONFIG = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SHAPES = {"matrix": (4, 3), "norm": (3,), "scale": (), "experts.up_proj_bias": (2, 3)}
CHANGING = [  # what steps with settings of their own take
    evolve(CONFIG, betas=(0.5, 0.6), weight_decay=2.0),
    evolve(CONFIG, eps=1e-1, weight_decay=0.0),
    evolve(CONFIG, lr=5e-3, betas=(0.0, 0.99)),
    CONFIG,
]

Params = dict[str, torch.nn.Parameter]


def make_params(seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def by_formula(configs: Sequence[OptimizerConfig]) -> dict[str, Array]:
    """Loshchilov & Hutter 2019, algorithm 2, in float64, with a config for each step."""
    values = {name: param.detach().double().numpy() for name, param in make_params().items()}
    first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    second = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step, config in enumerate(configs):
        beta1, beta2 = config.betas
        for name, gradient in gradients(step).items():
            g = gradient.double().numpy()
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g**2
            m = first[name] / (1 - beta1 ** (step + 1))
            v = second[name] / (1 - beta2 ** (step + 1))
            decay = config.weight_decay if name == "matrix" else 0.0
            values[name] = values[name] - config.lr * (m / (np.sqrt(v) + config.eps) + decay * values[name])
    return values


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_follow_the_formula_with_settings_of_their_own(fused: bool, decay: float) -> None:
    params = make_params()
    optimizer = adamw(params, SHAPES, evolve(CONFIG, weight_decay=decay), fused=fused)
    for step, config in enumerate(CHANGING):
        for name, gradient in gradients(step).items():
            params[name].grad = gradient
        set_adam(optimizer, config)
        optimizer.step()
    for name, expected in by_formula(CHANGING).items():
        np.testing.assert_allclose(params[name].detach().numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("limit", [0.5, 1e3])
@pytest.mark.parametrize("fused", [False, True])
def test_scaled_steps_equal_those_with_gradients_that_torch_clips(fused: bool, limit: float) -> None:
    scale, config = 0.125, evolve(CONFIG, weight_decay=0.1)
    params, wanted = make_params(), make_params()
    optimizer, reference = (adamw(each, SHAPES, config, fused=fused) for each in (params, wanted))
    for step in range(3):
        for name, gradient in gradients(step).items():
            params[name].grad, wanted[name].grad = gradient.clone(), gradient * scale
        norm = float(torch.nn.utils.clip_grad_norm_(wanted.values(), limit))
        assert (norm > limit) == (limit < 1.0)
        reference.step()
        step_scaled(optimizer, scale * clip_factor(limit, norm))
        assert not hasattr(optimizer, "grad_scale")  # a step of another caller is as it was
    for name in SHAPES:
        torch.testing.assert_close(params[name], wanted[name], rtol=1e-6, atol=1e-7)
        for moment in ("exp_avg", "exp_avg_sq"):
            found, right = (each.state[of[name]][moment] for each, of in ((optimizer, params), (reference, wanted)))
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("factor", [0.0, 1e-39])  # of which float32 has no reciprocal
@pytest.mark.parametrize("fused", [False, True])
def test_a_factor_of_nearly_zero_steps_as_zero_gradients_do(fused: bool, factor: float) -> None:
    params = make_params()
    optimizer = adamw(params, SHAPES, evolve(CONFIG, weight_decay=0.0), fused=fused)
    for name, gradient in gradients(0).items():
        params[name].grad = gradient
    step_scaled(optimizer, factor)
    for name, param in make_params().items():
        assert torch.equal(params[name], param)


def test_a_rank_without_elements_steps_nothing() -> None:
    optimizer = adamw({"empty": torch.nn.Parameter(torch.zeros(0, 3))}, {"empty": (2, 3)}, CONFIG, fused=True)
    step_scaled(optimizer, 0.5)
    assert not optimizer.state
