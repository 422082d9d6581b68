from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from corerl.models.build import build_on_meta
from corerl.models.initial import Constant, Fixed, Initial, Normal, Uniform, initials
from corerl.models.names import hf_boxes
from corerl.models.random import RandomSource
from corerl_testing.models import KINDS, tiny_config

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    boxes = hf_boxes(build_on_meta(config, dtype=torch.float32, attention="eager"))
    return {box.name: box.shape for found in boxes.values() for box in found}


def drawn(config: PreTrainedConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    shapes = shapes_of(config)
    source = RandomSource(config, shapes, seed, initials=initials(config, seed=seed))
    return {name: source.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_of_every_tensor_of_the_usual_families_what_is_usual(kind: str) -> None:
    config = tiny_config(kind)
    shapes = shapes_of(config)
    usual = RandomSource(config, shapes, seed=3)
    assert initials(config, seed=3).keys() == shapes.keys()
    for name, values in drawn(config).items():
        assert torch.equal(values, usual.read(name, (0,) * len(shapes[name]), shapes[name])), name


def test_norms_that_add_one_to_their_weight_begin_as_zeros() -> None:
    gemma = AutoConfig.for_model("gemma2", **SMALL, num_key_value_heads=2, head_dim=16, intermediate_size=96)
    values = drawn(gemma)
    assert not values["model.norm.weight"].any() and not values["model.layers.1.input_layernorm.weight"].any()


def test_a_routers_bias_begins_as_zeros_and_each_expert_like_any_matrix() -> None:
    config = tiny_config("glm4-moe")
    found = initials(config, seed=0)
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert isinstance(bias, Fixed) and torch.equal(bias.values, torch.zeros(8))
    assert found["model.layers.1.mlp.experts.5.up_proj.weight"] == Normal(0.0, config.initializer_range)


def test_a_state_space_models_decays_and_convolutions_begin_as_its_authors_say() -> None:
    mamba = AutoConfig.for_model("mamba2", **(SMALL | {"num_heads": 4}), head_dim=32, state_size=16, n_groups=2)
    found, values = initials(mamba, seed=0), drawn(mamba)
    assert torch.equal(values["backbone.layers.0.mixer.A_log"], torch.log(torch.arange(1.0, 5.0)))
    assert torch.equal(values["backbone.layers.0.mixer.D"], torch.ones(4))
    assert all(torch.equal(a, b) for a, b in zip(drawn(mamba).values(), values.values(), strict=True))
    convolution = found["backbone.layers.0.mixer.conv1d.weight"]
    bound = 1 / math.sqrt(4)  # He et al. 2015 with a = sqrt(5), for a width of 4: the square root of 1 / fan
    assert isinstance(convolution, Uniform) and convolution.high == pytest.approx(bound)
    assert convolution.low == -convolution.high
    assert float(values["backbone.layers.0.mixer.conv1d.weight"].abs().max()) < bound


@pytest.mark.parametrize(
    ("initial", "mean", "deviation", "furthest"),
    [
        (Normal(0.5, 0.1), 0.5, 0.1, math.inf),
        (Normal(0.0, 1.0, most=1.0), 0.0, 0.5396, 1.0),  # of a normal cut at one deviation, from its density there
        (Uniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12), 2.0),
        (Constant(7.0), 7.0, 0.0, 0.0),
    ],
)
def test_values_have_the_distribution_that_is_asked_for(
    initial: Initial, mean: float, deviation: float, furthest: float
) -> None:
    shape = (400, 500)
    source = RandomSource(tiny_config("qwen3"), {"w": shape}, 0, initials={"w": initial})
    values = source.read("w", (0, 0), shape)
    assert float(values.mean()) == pytest.approx(mean, abs=0.01)
    assert float(values.std()) == pytest.approx(deviation, abs=0.01)
    assert float((values - mean).abs().max()) <= furthest
    assert torch.equal(source.read("w", (30, 40), (5, 6)), values[30:35, 40:46])
