"""What is said, or refused, of a model's experts and of the fields that only transformers' own training reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from transformers import PreTrainedConfig

from corerl.config.schema import Config, LoraConfig
from corerl.models.files import look_at
from corerl.plan.make import plan_group
from corerl.plan.models import RoleModel, against_aux_loss, build_models, load_configs, notices_of, without_adapters
from corerl.plan.resolve import plugins_of
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config, tiny_fields
from tests.driver.saved import config_in, make_config
from tests.pictures import pictures_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path / "run")


def balancing(config: Config, coef: float = 0.25) -> Config:
    return evolve(config, train=evolve(config.train, aux_loss_coef=coef))


def model_of(config: Config, hf: PreTrainedConfig) -> RoleModel:
    """The actor's, with another model in the place of its own."""
    given = make_config()
    model = build_models(given, plugins_of(given), load_configs(given, ["actor"]))["actor"]
    return evolve(model, settings=config.model, train=config.train, lora=config.lora, hf=hf, built=look_at(hf))


def lines(config: Config, hf: PreTrainedConfig) -> list[str]:
    return list(notices_of(model_of(config, hf)))


def router_loss(model_type: str, **fields: Any) -> PreTrainedConfig:
    return smallest_config(model_type, output_router_logits=True, **fields)


@pytest.mark.parametrize(
    ("model_type", "name", "fields"),
    [
        ("qwen3_moe", "router_aux_loss_coef", {"router_aux_loss_coef": 0.125}),
        ("dbrx", "moe_loss_weight", {"ffn_config": {"moe_loss_weight": 0.125}}),
    ],
)
def test_a_coefficient_that_only_transformers_reads_is_said(
    config: Config, model_type: str, name: str, fields: dict[str, Any]
) -> None:
    hf = router_loss(model_type, **fields)
    line = (
        f"model.config: {name}=0.125 changes transformers' loss, not CoreRL's; set train.aux_loss_coef=0.125 to have it"
    )
    assert lines(config, hf) == [line]
    assert lines(balancing(config), hf) == []


@pytest.mark.parametrize(
    "hf",
    [
        smallest_config("qwen3_moe", router_aux_loss_coef=0.125),
        router_loss("qwen3_moe", router_aux_loss_coef=0.0),
        router_loss("llama4_text", router_aux_loss_coef=0.125),  # which transformers' loss of it leaves out
        smallest_config("gpt2"),  # has dropout by default
    ],
)
def test_a_coefficient_that_nobody_reads_is_not_said(config: Config, hf: PreTrainedConfig) -> None:
    assert lines(config, hf) == []


def test_other_terms_noise_and_further_layers_are_said(config: Config) -> None:
    (line,) = lines(config, smallest_config("bamba", z_loss_coefficient=0.5))
    assert line.startswith("model.config: z_loss_coefficient=0.5 changes transformers' loss, not CoreRL's, which has")
    (line,) = lines(config, smallest_config("mixtral", router_jitter_noise=0.25))
    assert line.startswith("model.config: router_jitter_noise=0.25: trained without this noise here")
    hf = smallest_config("glm4_moe", num_nextn_predict_layers=1)
    assert lines(config, hf) == []  # from random weights nobody misses any
    stored = evolve(config, model=evolve(config.model, path="models/glm", config={}))
    (line,) = lines(stored, hf)
    assert line.startswith("model.path: config.json: num_nextn_predict_layers=1: layers that predict further tokens")


def test_untrained_parts_have_no_line_of_their_own(config: Config) -> None:
    stored = evolve(config, model=evolve(config.model, path="models/pictures", config={}))
    hf = pictures_config("qwen3_5")
    hf.get_text_config().mtp_num_hidden_layers = 1  # an export has these layers, and the tower
    hf.projector_dropout = 0.125
    hf.architectures = ["Qwen3_5ForCausalLM"]
    (line,) = lines(stored, hf)
    assert "mtp_num_hidden_layers=1" in line
    hf.architectures = ["Qwen3_5ForConditionalGeneration"]
    assert lines(stored, hf) == []


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3", "but the actor's model has no experts"),
        ("glm4_moe", "but transformers has no such loss for Glm4MoeForCausalLM"),
        ("jetmoe", "but it is not known which modules of JetMoeForCausalLM route"),
    ],
)
def test_models_that_cannot_be_balanced_are_refused(config: Config, model_type: str, said: str) -> None:
    hf = smallest_config(model_type)
    assert list(against_aux_loss(model_of(balancing(config), hf), streamed=False)) == [
        f"train.aux_loss_coef: 0.25, {said}; set it to 0"
    ]
    assert list(against_aux_loss(model_of(config, hf), streamed=False)) == []


def test_a_step_whose_tokens_are_not_known_is_refused(config: Config) -> None:
    model = model_of(balancing(config), tiny_config("qwen3-moe"))
    assert list(against_aux_loss(model, streamed=False)) == []
    (line,) = against_aux_loss(model, streamed=True)
    assert "weighs tokens by how many the step has" in line and line.endswith("or rollout.source to 'synchronous'")


def test_experts_without_adapters_are_said(config: Config) -> None:
    lora, hf = LoraConfig().settled({"rank": 2, "targets": ("q_proj", "v_proj")}), tiny_config("qwen3-moe")
    assert list(without_adapters(model_of(evolve(config, lora=lora), hf))) == [
        "lora: 4 fused tensors of experts (gate_up_proj, down_proj) get no adapters"
    ]
    assert list(without_adapters(model_of(evolve(config, lora=lora), tiny_config("qwen3")))) == []
    assert list(without_adapters(model_of(config, hf))) == []


def test_a_group_alone_is_told_the_same(config: Config) -> None:
    fields = {**tiny_fields("qwen3-moe"), "output_router_logits": True}
    asked = evolve(config, model=evolve(config.model, config=fields), lora=LoraConfig())
    notices = plan_group(asked, "actor", resume="").notices
    assert sum("changes transformers' loss" in line or "get no adapters" in line for line in notices) == 2
