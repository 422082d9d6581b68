"""What the extension `advice` says of a run before its first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from corerl.cluster.arrangement import arrange
from corerl.config.schema import CheckpointConfig, Config, DataConfig, LoraConfig, ModelConfig
from corerl.config.toml_text import to_plain
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.plan.data import with_prompt_check
from corerl.plan.resolve import settle_algorithm
from corerl_doctor.advice import (
    absent_extensions,
    changed_settings,
    of_files,
    of_learning,
    of_model,
    tokens_of_pictures,
    too_few_cores,
    untrained,
    unused,
    without_adapters,
)
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config
from tests.driver.saved import config_in, make_config, make_model
from tests.pictures import write_pictures
from tests.plan.test_models import model_of
from tests.plan.test_pictures import ROWS, planned
from tests.plan.test_pictures import config_of as pictured


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_in(tmp_path / "run")


def lines(config: Config, hf: Any) -> list[str]:
    return list(of_model(model_of(config, hf)))


def test_layers_of_a_checkpoint_that_are_not_trained_are_said(config: Config) -> None:
    hf = smallest_config("glm4_moe", num_nextn_predict_layers=1)
    assert lines(config, hf) == []  # from random weights nobody misses any
    stored = evolve(config, model=evolve(config.model, path="models/glm", config={}))
    (line,) = lines(stored, hf)
    assert line.startswith("model.path: config.json: num_nextn_predict_layers=1: layers that predict further tokens")
    others = [evolve(model_of(stored, hf), **{name: value}) for name, value in (("trained", False), ("critic", True))]
    assert [list(of_model(other)) for other in others] == [[], []]


def test_experts_without_adapters_are_said_with_their_share(config: Config) -> None:
    lora, hf = LoraConfig().settled({"rank": 2, "targets": ("q_proj", "v_proj")}), tiny_config("qwen3-moe")
    weights = {name: param.numel() for name, param in meta_model(hf).named_parameters()}
    covered = sum(numel for name, numel in weights.items() if "q_proj" in name or "v_proj" in name)
    assert list(without_adapters(model_of(evolve(config, lora=lora), hf))) == [
        (
            f"lora: adapters cover {covered / sum(weights.values()):.2%} of the weights: 4 fused tensors of experts "
            "(gate_up_proj, down_proj) get none; the target 'experts' may give them adapters (docs/lora.md)"
        )
    ]
    of_experts = evolve(lora, targets=("q_proj", "experts"))
    assert list(without_adapters(model_of(evolve(config, lora=of_experts), hf))) == []
    assert list(without_adapters(model_of(evolve(config, lora=lora), tiny_config("qwen3")))) == []
    assert list(without_adapters(model_of(config, hf))) == []


def test_what_the_files_have_besides_is_listed(tmp_path: Path) -> None:
    config = make_config()
    make_model(config, seed=1).save_pretrained(tmp_path)
    hf, file = hf_config(ModelConfig(path=str(tmp_path))), tmp_path / "model.safetensors"

    def told(**more: torch.Tensor) -> str:
        save_file({**tensors, **more}, file, metadata={"format": "pt"})
        return unused(str(tmp_path), hf)

    tensors = load_file(file)
    assert told() == ""
    copy = tensors["model.embed_tokens.weight"].clone()
    assert told(**{"value_head.weight": torch.zeros(1, 32), "lm_head.weight": copy}) == ""  # a critic's head
    tensors["score.weight"] = torch.zeros(2)
    what = f"{tmp_path} has a tensor that the model lacks, not used: score.weight"
    assert told() == what
    many = {f"model.layers.{layer}.mlp.scale": torch.zeros(2) for layer in range(10, 22)}
    assert told(**many) == (
        f"{tmp_path} has 13 tensors that the model lacks, not used: "
        + ", ".join(f"model.layers.{layer}.mlp.scale" for layer in range(10, 18))
        + ", and 5 more"
    )


def test_it_is_noted_which_parts_that_read_pictures_learn(tmp_path: Path) -> None:
    directory = write_pictures("qwen3_vl", tmp_path)
    hf = hf_config(ModelConfig(path=str(directory)))

    def noted(**settings: Any) -> list[str]:
        given = {"settings": ModelConfig(path=str(directory), **settings), "hf": hf, "built": meta_model(hf)}
        role: Any = SimpleNamespace(table="model", frozen=False, **given)
        return list(of_files(role, read=True))

    (line,) = noted()
    assert "are not trained, as the run reads text alone, and an export has them unchanged: model.visual" in line
    (line,) = noted(pictures="vision")
    assert "are not trained, with model.tower='frozen', and an export has them unchanged: model.visual" in line
    assert noted(pictures="vision", tower="trained") == []


def test_weights_that_no_pass_reads_are_noted() -> None:
    hf = smallest_config("bart")
    model = meta_model(hf)
    unread = {name: param.numel() for name, param in model.named_parameters() if "encoder_attn" in name}
    share = sum(unread.values()) / sum(param.numel() for param in model.parameters())
    line = untrained("", hf, model)
    assert line.startswith(f"{len(unread)} tensors ({share:.1%} of the weights) are not trained, as the run reads text")
    assert line.endswith("model.decoder.layers.1.encoder_attn_layer_norm")
    dense = smallest_config("qwen3")
    assert untrained("", dense, meta_model(dense)) == ""


@pytest.mark.parametrize(
    ("place", "estimator", "gradient"),
    [
        (
            "loss",
            "k3-differentiated",
            "KL(reference || policy), and after the first optimizer step on a batch of neither",
        ),
        ("reward", "k2", "the mean of k2 - KL(policy || reference), which can lead away from the reference"),
        ("reward", "k3", "KL(policy || reference) - KL(reference || policy), which can lead away from the reference"),
        *(("loss", estimator, "") for estimator in ("k1", "k2", "k3", "")),
        *(("reward", estimator, "") for estimator in ("k1", "")),
    ],
)
def test_a_penalty_with_another_gradient_than_the_kls_is_named(place: Any, estimator: str, gradient: str) -> None:
    given = settle_algorithm(make_config(algorithm={"kl_coef": 0.1, "kl_in": place, "kl_estimator": estimator or None}))
    assert list(of_learning(given)) == [
        f"algorithm.kl_estimator: {estimator!r} with algorithm.kl_in={place!r}: the penalty's gradient is that of "
        f"{each}; remove it for that of KL(policy || reference)"
        for each in [gradient]
        if each
    ]


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ({"kl_estimator": "k3"}, True),
        ({}, False),  # settling chooses no estimator that nobody asked for
        ({"kl_coef": 0.1}, False),
        ({"kl_coef": 0.1, "kl_estimator": "k3"}, False),
    ],
)
def test_an_estimator_without_a_penalty_is_named(algorithm: dict[str, Any], named: bool) -> None:
    line = (
        "algorithm.kl_estimator: 'k3' has no effect, as algorithm.kl_coef is 0; set that for a KL penalty, or remove "
        "this"
    )
    assert list(of_learning(settle_algorithm(make_config(algorithm=algorithm)))) == [line] * named


def test_a_notice_says_how_many_tokens_a_picture_takes(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "5<image>", "images": ["4x3:1"]}]
    config = evolve(pictured(tmp_path, rows), data=DataConfig(source=str(tmp_path / "rows.jsonl"), held_out=0))
    config = evolve(config, rollout=evolve(config.rollout, max_tokens=2))
    plan = with_prompt_check(planned(config), config)
    (line,) = tokens_of_pictures(plan)
    assert line.endswith("3 pictures each takes 6 to 15 tokens of a prompt; the model sees the largest at 4x3")
    text = pictured(tmp_path, [{"prompt": "1"}, {"prompt": "2"}])
    alone = with_prompt_check(planned(text), text)
    assert list(tokens_of_pictures(alone)) == ["model.pictures: none of the first 1 prompts has a picture"]


def test_a_resumed_run_names_the_settings_that_have_changed() -> None:
    config = make_config(train={"optimizer": {"lr": 1e-3}}, run={"dir": "a", "steps": 4})
    before = to_plain(config)
    assert changed_settings(before, before) == []
    longer = evolve(config, run=evolve(config.run, dir="b", steps=8), checkpoint=CheckpointConfig(resume="auto"))
    assert changed_settings(before, to_plain(longer)) == []
    other = evolve(
        longer,
        train=evolve(config.train, optimizer=evolve(config.train.optimizer, lr=1e-4)),
        data=evolve(config.data, source="x" * 60),
        backends={"other": {"a": 1, "b": 2}},
    )
    (line,) = changed_settings(before, to_plain(other))
    start, *changes = line.replace(": ", ", ", 1).split(", ")
    assert start == "resumed with other settings"
    assert sorted(changes) == [
        "backends.other",
        f"data.source={'x' * 60!r:.37}... (was 'sort-digits')",
        "train.optimizer.lr=0.0001 (was 0.001)",
    ]
    alike = ({"data": {"source": "/a/long/path/of/a/data/set/in/files/" + name}} for name in ("one.jsonl", "two.jsonl"))
    (line,) = changed_settings(*alike)
    assert "two.jsonl (was ..." in line and line.endswith("one.jsonl)")


def test_a_broken_extension_that_may_join_is_noted(install: Callable[..., Path]) -> None:
    before = list(absent_extensions())
    install("corerl-torn", {"extensions": {"torn": "torn_j:SPEC"}}, torn_j="import a_library_that_is_not_there")
    (line,) = [line for line in absent_extensions() if line not in before]
    assert line == (
        "the extension 'torn' of corerl-torn takes no part: ModuleNotFoundError: No module named "
        "'a_library_that_is_not_there'; run corerl doctor torn, or uninstall corerl-torn"
    )


def test_a_group_with_more_processes_than_cores_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    groups = {"actor": 2, "critic": 2, "engines": 2}  # on the same cores in turns
    assert list(too_few_cores(arrange(groups))) == []
    assert list(too_few_cores(arrange({**groups, "critic": 3}))) == [
        "3 processes of critic share the 2 cores that this run may use; fewer take less time"
    ]
