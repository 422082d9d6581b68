"""The first module in which a broken way through a model parts from transformers' own is named, with its kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.config import ModelConfig
from corerl.models import Policy, WholePolicy
from corerl.plugin import Finding, Level
from corerl_doctor import layers
from corerl_doctor.layers import TOLERANCE, compare, compare_layers, plain_model, policy_like, shorten_windows
from corerl_testing import make_plan, smallest_config, tiny_config
from tests.driver.forgetful import LEFT_OUT, model_with
from tests.in_process import small


def both(config: PreTrainedConfig, layout: str, *, path: str = "") -> tuple[Policy, PreTrainedModel]:
    """What a trainer makes of a config, and transformers' own model, with the same weights."""
    plain = plain_model(config, ModelConfig(path=path), seed=0)
    return policy_like(plain, config, layout=layout), plain


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (tiny_config("qwen3-moe"), "packed"),
        (tiny_config("glm4-moe"), "whole"),
        (smallest_config("gemma3_text"), "whole"),  # its rotary embeddings are equal for all rows
        (smallest_config("llama4_text"), "whole"),  # its rotary embeddings are complex
    ],
    ids=["packed", "whole", "window", "complex"],
)
def test_both_ways_through_a_model_agree_module_by_module(config: PreTrainedConfig, layout: str) -> None:
    trained, plain = both(config, layout)
    assert isinstance(trained, WholePolicy) is (layout == "whole")
    found = compare(trained, plain, temperature=0.7)
    modules = [name for name, module in plain.named_modules() if name]
    assert found.parting is None and 0 < found.largest < 0.01 * TOLERANCE
    # All but lists of layers, the head, which the trainer reads without calling it, and parts of experts.
    assert len(modules) - 8 <= found.modules < len(modules)


@pytest.mark.parametrize(
    ("what", "kind", "where"),
    [
        ("window", "attention", "model.layers.0.self_attn, before o_proj"),
        ("sinks", "attention", "model.layers.0.self_attn, before o_proj"),
        ("softcap", "head", "what turns the last hidden states into log-probs"),
        ("router_bias", "router", "model.layers.1.mlp.gate"),
    ],
)
def test_what_a_trainer_leaves_out_is_found_in_its_layer(what: str, kind: str, where: str, tmp_path: Path) -> None:
    model = model_with(what)
    model.save_pretrained(tmp_path)
    policy, plain = both(model.config, "whole", path=str(tmp_path))
    assert compare(policy, plain).parting is None
    LEFT_OUT[what].leave_out(policy.model)
    parting = compare(policy, plain).parting
    assert parting is not None and parting.difference > 0.1
    assert (parting.kind, parting.where) == (kind, where)


def norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 100.0


def mlp(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.1


def residual(model: Any) -> None:
    model.model.layers[0].residual_multiplier = 2.0


@pytest.mark.parametrize(
    ("break_", "kind", "where"),
    [
        (norm, "norm", "model.layers.1.post_attention_layernorm"),
        (mlp, "mlp", "model.layers.1.mlp.act_fn"),
        (rotary, "rotary embedding", "model.rotary_emb"),
        (residual, "residual stream", "model.layers.0, before post_attention_layernorm"),
    ],
)
def test_the_kind_of_a_wrong_layer_is_named(break_: Callable[[Any], None], kind: str, where: str) -> None:
    policy, plain = both(smallest_config("granite", initializer_range=0.3), "whole")
    break_(policy.model)
    parting = compare(policy, plain).parting
    assert parting is not None and (parting.kind, parting.where) == (kind, where)


def test_a_long_window_is_made_to_end_within_the_sequences() -> None:
    config = smallest_config("mistral", sliding_window=4096, initializer_range=0.3)
    shorten_windows(config)
    policy, plain = both(config, "whole")
    LEFT_OUT["window"].leave_out(policy.model)
    parting = compare(policy, plain).parting
    assert parting is not None and parting.kind == "attention"
    without = smallest_config("granite")
    shorten_windows(without)
    assert getattr(without, "sliding_window", None) is None


def test_the_finding_says_where_the_layers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = make_plan(small(tmp_path)).processes.roles["actor"].assignments[0].config
    *_, agrees = compare_layers(role, temperature=1.0)
    assert isinstance(agrees, Finding) and agrees.level is Level.OK
    assert agrees.what.startswith("CoreRL's packed pass and transformers' own agree in all 34 modules that could be ")
    monkeypatch.setattr(layers, "policy_like", broken(policy_like))
    *_, parts = compare_layers(role, temperature=1.0)
    assert isinstance(parts, Finding) and parts.level is Level.ERROR
    assert re.fullmatch(
        r"CoreRL's packed pass and transformers' own part at the mlp: model.layers.1.mlp.act_fn differs by \S+ of its "
        r"size, after 31 modules that agree",
        parts.what,
    )
    assert parts.why == "the trainer scores tokens with another model than the engine samples from"
    assert parts.fix == "set train.layout='whole', and report this line"
    monkeypatch.setattr(layers, "free_memory", lambda: 2**15)
    (short,) = compare_layers(role, temperature=1.0)
    assert isinstance(short, Finding) and short.level is Level.WARNING
    assert short.what.startswith("the layers were not compared: the model takes 7.13e-05 GiB in float32, and this ")
    assert short.what.endswith("3.05e-05 GiB free")


def broken(make: Callable[..., Policy]) -> Callable[..., Policy]:
    def made(*args: Any, **kwargs: Any) -> Policy:
        policy = make(*args, **kwargs)
        mlp(policy.model)
        return policy

    return made
