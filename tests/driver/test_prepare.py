from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from attrs import evolve

from corerl.config.schema import CheckpointConfig, Config, RunConfig
from corerl.driver.prepare import prepare, require_same_model, resolve_device, resume_from, title
from corerl.errors import CheckpointError, ConfigError
from corerl.models.config import hf_config
from tests.driver.saved import make_config, make_model, save


def config_in(run_dir: Path, resume: str = "never", **tables: Any) -> Config:
    return evolve(make_config(**tables), run=RunConfig(dir=str(run_dir)), checkpoint=CheckpointConfig(resume=resume))


def test_a_sound_config_is_prepared_without_a_process_or_a_file(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run", rollout={"engine": "fake", "prompts": 8, "samples": 4, "replicas": 2})
    prepared = prepare(evolve(config, cluster=evolve(config.cluster, device="cpu", placement="disaggregated")))
    assert (prepared.device, prepared.run_dir, prepared.resume, prepared.state) == ("cpu", tmp_path / "run", None, {})
    assert (prepared.seating.ranks, prepared.seating.engines, prepared.seating.bundles) == ((0,), (1, 2), 3)
    assert prepared.tokenizer("0>")["input_ids"] == [1, 4, 14]
    assert prepared.params.stop_tokens == (2,)
    assert len(prepared.prompts.held_out) == 16
    assert prepared.actor.assignments[0].config.resume == ""
    assert title(prepared) == "grpo on sort-digits: qwen3 from scratch, 1 plain ranks, 2 fake engines, cpu"
    assert not ray.is_initialized() and not (tmp_path / "run").exists()


def test_a_resumed_run_is_told_where_its_checkpoint_stands(tmp_path: Path) -> None:
    config = config_in(tmp_path, "auto")
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=4)
    prepared = prepare(config)
    assert prepared.resume == checkpoint
    assert prepared.state["rollout_step"] == 4
    assert prepared.actor.assignments[0].config.resume == str(checkpoint / "actor")


def test_which_checkpoint_a_run_goes_on_from(tmp_path: Path) -> None:
    config = make_config()
    model = make_model(config, seed=1)
    run, empty = tmp_path / "run", tmp_path / "empty"
    older, newest = (save(run, config, model, step=step) for step in (2, 4))
    assert resume_from(config_in(empty), empty) is None
    assert resume_from(config_in(empty, "auto"), empty) is None
    assert resume_from(config_in(run, "auto"), run) == newest
    assert resume_from(config_in(empty, str(older)), empty) == older
    assert resume_from(config_in(run, str(newest)), run) == newest
    for resume in ("never", str(older)):
        with pytest.raises(ConfigError, match=r"already holds a run \(step-00000004\)"):
            resume_from(config_in(run, resume), run)


def test_a_checkpoint_must_hold_every_tensor_of_the_model_in_its_shape(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=2)
    fields = dict(config.model.config)

    def require(**changes: Any) -> None:
        require_same_model(checkpoint, hf_config(evolve(config.model, config={**fields, **changes})))

    require()
    with pytest.raises(CheckpointError, match=r"has \[16, 32\] for 'model.embed_tokens.weight'.* wants \[19, 32\]"):
        require(vocab_size=19)
    with pytest.raises(CheckpointError, match=r"lacks 'lm_head.weight', this run's model wants \[16, 32\]"):
        require(tie_word_embeddings=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_auto_takes_the_cpu_and_cuda_is_refused() -> None:
    assert [resolve_device(device) for device in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="torch sees no CUDA device here; use 'cpu' or 'auto'"):
        resolve_device("cuda")
