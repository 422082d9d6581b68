"""AdamW against its formula in float64, and its state when it is made, moved and taken up again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.backend.optimizer import adamw, moments, set_adam, set_adam_step, set_lr
from corerl.config.schema import OptimizerConfig
from corerl.types import Array

CONFIG = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SHAPES = {"matrix": (4, 3), "norm": (3,), "scale": (), "experts.up_proj_bias": (2, 3)}
LRS = [0.0, 2e-2, 1e-2, 5e-3]
RATES = [evolve(CONFIG, lr=lr) for lr in LRS]
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


def take_steps(optimizer: torch.optim.Optimizer, params: Params, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            params[name].grad = gradient
        set_lr(optimizer, LRS[step])
        optimizer.step()


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


@pytest.mark.parametrize("fused", [False, True])
def test_steps_follow_the_formula_and_only_matrices_decay(fused: bool) -> None:
    params = make_params()
    take_steps(adamw(params, SHAPES, CONFIG, fused=fused), params, range(len(LRS)))
    for name, expected in by_formula(RATES).items():
        np.testing.assert_allclose(params[name].detach().numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=name)


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


def test_a_learning_rate_of_zero_changes_nothing_but_the_moments() -> None:
    params = make_params()
    optimizer = adamw(params, SHAPES, CONFIG, fused=False)
    take_steps(optimizer, params, range(1))
    for name, before in make_params().items():
        assert torch.equal(params[name], before)
        torch.testing.assert_close(
            moments(optimizer, params[name], 1)["exp_avg"], 0.1 * gradients(0)[name], rtol=1e-6, atol=0
        )


def test_a_flat_shard_decays_as_its_matrix_does() -> None:
    config = OptimizerConfig(lr=0.5, weight_decay=0.1)
    params = {name: torch.nn.Parameter(torch.ones(3)) for name in ("matrix", "norm")}
    optimizer = adamw(params, {"matrix": (4, 3), "norm": (3,)}, config, fused=False)
    for param in params.values():
        param.grad = torch.zeros(3)  # nothing is left but the decay, 1 - lr * weight_decay
    optimizer.step()
    torch.testing.assert_close(params["matrix"].detach(), torch.full((3,), 0.95))
    assert torch.equal(params["norm"].detach(), torch.ones(3))


def test_a_matrix_that_is_frozen_does_not_decay() -> None:
    params = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("matrix", "frozen")}
    shapes = dict.fromkeys(params, (2, 2))
    optimizer = adamw(params, shapes, OptimizerConfig(lr=0.5, weight_decay=0.1), fused=False, frozen=["frozen"])
    for param in params.values():
        param.grad = torch.zeros(2, 2)
    optimizer.step()
    assert [float(param.detach().mean()) for param in params.values()] == pytest.approx([0.95, 1.0])


def test_what_this_rank_has_no_element_of_is_left_out() -> None:
    params = {**make_params(), "elsewhere": torch.nn.Parameter(torch.empty(0, 3))}
    optimizer = adamw(params, {**SHAPES, "elsewhere": (8, 3)}, CONFIG, fused=False)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in held} == {id(params[name]) for name in SHAPES}
    only_norms = adamw({"norm": params["norm"]}, SHAPES, CONFIG, fused=False)
    assert [group["weight_decay"] for group in only_norms.param_groups] == [0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_that_holds_nothing_has_an_optimizer_whose_steps_do_nothing(fused: bool) -> None:
    params = {"elsewhere": torch.nn.Parameter(torch.empty(0, 3))}
    optimizer = adamw(params, {"elsewhere": (8, 3)}, CONFIG, fused=fused)
    set_lr(optimizer, 0.5)
    optimizer.step()
    set_adam_step(optimizer, 3)
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    assert not optimizer.state


@pytest.mark.parametrize("fused", [False, True])
def test_moments_asked_for_before_the_first_step_change_no_step(fused: bool) -> None:
    asked, not_asked = make_params(), make_params()
    optimizer = adamw(asked, SHAPES, CONFIG, fused=fused)
    for param in asked.values():
        state = moments(optimizer, param, 0)
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == param.shape
    take_steps(optimizer, asked, range(3))
    take_steps(adamw(not_asked, SHAPES, CONFIG, fused=fused), not_asked, range(3))
    for name in SHAPES:
        assert torch.equal(asked[name], not_asked[name])


@pytest.mark.parametrize("fused", [False, True])
def test_moments_and_step_count_that_are_moved_go_on_bit_for_bit(fused: bool) -> None:
    """As a resume does it: ask for the moments of a fresh optimizer, fill them, then set Adam's step."""
    whole = make_params()
    first = adamw(whole, SHAPES, CONFIG, fused=fused)
    take_steps(first, whole, range(2))

    resumed = make_params(seed=7)
    second = adamw(resumed, SHAPES, CONFIG, fused=fused)
    with torch.no_grad():
        for name, param in resumed.items():
            param.copy_(whole[name])
            for key in ("exp_avg", "exp_avg_sq"):
                moments(second, param, 0)[key].copy_(moments(first, whole[name], 2)[key])
    set_adam_step(second, 2)

    take_steps(first, whole, range(2, 4))
    take_steps(second, resumed, range(2, 4))
    for name in SHAPES:
        assert torch.equal(resumed[name], whole[name])


def test_moments_made_late_count_from_the_given_step() -> None:
    params = make_params()
    optimizer = adamw(params, SHAPES, CONFIG, fused=False)
    assert moments(optimizer, params["norm"], 5)["step"].item() == 5.0
    set_adam_step(optimizer, 8)
    assert moments(optimizer, params["norm"], 5)["step"].item() == 8.0
