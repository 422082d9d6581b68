from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from corerl.config.load import config_of, recorded
from corerl.config.schema import ModelConfig
from corerl.config.toml_text import to_plain
from corerl.errors import CheckpointError, ConfigError, UserError
from corerl.models.tokenizer import character_tokenizer
from corerl.plan.make import make_plan
from corerl.plan.residency import resolve_device
from corerl.rollout.recorded import write_rollout
from tests.driver.saved import DATA, config_in, make_config, make_model, save
from tests.rollout.scored import scored

Install = Callable[..., Path]


def test_who_joins_always_takes_part_and_is_not_recorded(tmp_path: Path, install: Install, extension_spec: str) -> None:
    always = extension_spec.replace("api=(2, 0),", 'api=(2, 0), joins="always",')
    install("corerl-all", {"extensions": {"all": "all_p:SPEC"}}, all_p=always)
    plan = make_plan(config_in(tmp_path / "run", extensions=[{"name": "jsonl"}]))
    assert [each.name for each in plan.extensions][:1] == ["jsonl"] and "all" in {each.name for each in plan.extensions}
    assert "all" in {each.name for each in plan.processes.roles["actor"].assignments[0].extensions}
    assert [each["name"] for each in plan.record["extensions"]] == ["jsonl"]
    defaults = make_plan(evolve(config_in(tmp_path / "run"), extensions=None))
    assert [each["name"] for each in defaults.record["extensions"]] == ["console", "jsonl", "tensorboard", "curves"]


@pytest.mark.usefixtures("only_listed")
def test_requirements_of_all_distributions_that_take_part_are_checked(tmp_path: Path, required: list[set[str]]) -> None:
    make_plan(config_in(tmp_path / "run", backend={"name": "fsdp"}, rollout={"engine": "transformers"}))
    assert required == [{"corerl", "corerl-fsdp", "corerl-transformers"}]


def test_each_roles_layout_is_chosen_and_explained(tmp_path: Path) -> None:
    whole = {"path": "", "config": {**DATA["model"]["config"], "model_type": "nemotron"}}
    critic = {"roles": {"critic": {"ranks": 1, "model": whole, "train": {"precision": "float32"}}}}
    plan = make_plan(config_in(tmp_path / "run", algorithm={"name": "ppo"}, **critic))
    layouts = {name: role.train.layout for name, role in plan.processes.roles.items()}
    assert layouts == {"actor": "packed", "critic": "whole"}
    assert "1 plain rank, 1 plain rank for the critic, 1 " in plan.title
    (told,) = plan.notices
    assert told.startswith("roles.critic.train.layout: whole, on padded rows, because Nemotron")


# ---- the model -------------------------------------------------------------------------------------------------------


def test_a_models_directories_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path / "run")
    make_model(config, seed=0).save_pretrained(tmp_path / "model")
    character_tokenizer("0123456789>s").save_pretrained(tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)

    def given(model: ModelConfig) -> ModelConfig:
        plan = make_plan(evolve(config, model=model))
        given = plan.processes.roles["actor"].assignments[0].config.model
        assert plan.record["model"] == to_plain(given)
        return given

    tokens = given(ModelConfig(path="model", tokenizer="tokens"))
    assert tokens == ModelConfig(path=f"{tmp_path}/model", tokenizer=f"{tmp_path}/tokens")
    characters = given(ModelConfig(path="model", tokenizer="characters:0123456789>"))
    wanted = ModelConfig(path=f"{tmp_path}/model", tokenizer="characters:0123456789>", vocabulary=15)
    assert characters == wanted  # the model has 16 rows
    assert given(config.model) == config.model


def test_a_model_beside_python_files_is_refused_before_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_in(tmp_path / "run", backend={"name": "no_such_module:SPEC"})
    config = evolve(config, model=ModelConfig(path="."))
    with pytest.raises(UserError, match="no_such_module"):
        make_plan(config)
    (tmp_path / "modeling.py").write_text("")
    with pytest.raises(ConfigError, match=r"^model.path: '.' is the working directory.*\(modeling.py\)"):
        make_plan(config)


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "mode", "first_step"),
    [
        *((True, "train", 2), (True, "train-only", None), (False, "train", None), (False, "train-only", 2)),
        *((False, "rollout-only", 0), (False, "eval", 2)),  # these take the weights alone
    ],
)
def test_a_run_that_trains_goes_on_from_its_own_kind(
    tmp_path: Path, sampled: bool, mode: Any, first_step: int | None
) -> None:
    write_rollout(tmp_path, scored())
    config = make_config()
    state = None if sampled else {"rollout_step": 2, "source": {"files": 2}, "config": to_plain(recorded(config))}
    checkpoint = save(tmp_path / "run", config, make_model(config, seed=1), step=2, state=state)
    given = [f"run.dir={tmp_path}/new", f"checkpoint.resume={checkpoint}", f"run.mode={mode}"]
    saved = [f"rollout.saved={tmp_path}", "run.steps=1"] if mode == "train-only" else []
    resumed = config_of(DATA, [*given, *saved])
    if first_step is not None:
        assert make_plan(resumed, starting=False).first_step == first_step
        return
    said = "sampled its batches" if sampled else "read saved batches"
    line = f"{checkpoint} is of a run that {said}, but run.mode={mode!r} does not; resume with the run.mode"
    with pytest.raises(CheckpointError, match=f"^checkpoint.resume: {line}"):
        make_plan(resumed)


def test_a_run_from_saved_batches_needs_no_data(tmp_path: Path) -> None:
    write_rollout(tmp_path, scored())
    given = [f"run.dir={tmp_path}/run", "run.steps=1", f"rollout.saved={tmp_path}", "data.source=/gone.jsonl"]
    assert make_plan(config_of(DATA, [*given, "run.mode=train-only"])).record["data"]["source"] == "/gone.jsonl"


@pytest.mark.parametrize(("setting", "value"), [("roles.actor.ranks", 3), ("train.mini_batches", 3)])
def test_only_batches_that_a_run_samples_to_train_must_divide(tmp_path: Path, setting: str, value: int) -> None:
    write_rollout(tmp_path, scored())
    given = [f"run.dir={tmp_path}/run", "run.steps=1", "backend.name=fsdp", f"{setting}={value}"]
    with pytest.raises(ConfigError, match=rf"^rollout.prompts: 8 .*{setting}={value}"):
        make_plan(config_of(DATA, given))
    saved = ["run.mode=train-only", f"rollout.saved={tmp_path}"]
    for mode in (["run.mode=eval"], ["run.mode=rollout-only"], saved):
        assert make_plan(config_of(DATA, [*given, *mode])).run.mode in mode[0]


@pytest.mark.parametrize(("mode", "kl_coef"), [("train", 0.0), ("eval", 0.1), ("rollout-only", 0.1), ("train", 0.1)])
def test_a_resume_reads_the_models_files_for_a_reference_alone(tmp_path: Path, mode: Any, kl_coef: float) -> None:
    config = make_config()
    make_model(config, seed=0).save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    checkpoint = save(tmp_path / "run", config, make_model(config, seed=1), step=2)
    model = {"path": str(tmp_path / "model"), "tokenizer": DATA["model"]["tokenizer"]}
    algorithm = {"kl_coef": kl_coef, "reference": "" if mode == "train" else "/gone"}
    resumed = config_in(tmp_path / "other", str(checkpoint), model=model, algorithm=algorithm)
    resumed = evolve(resumed, run=evolve(resumed.run, mode=mode))
    if mode == "train" and kl_coef:
        with pytest.raises(UserError, match=r"^model.path: \S+ has no weights"):
            make_plan(resumed)
    else:
        assert make_plan(resumed).start.resume == checkpoint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_auto_means_cpu() -> None:
    assert [resolve_device(device) for device in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="torch sees no CUDA device here; use 'cpu' or 'auto'"):
        resolve_device("cuda")
