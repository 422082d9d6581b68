from __future__ import annotations

import json
import math
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from corerl.checkpoint.commit import begin, commit
from corerl.config.schema import ModelConfig
from corerl.driver.export import export, export_directory, write_adapters
from corerl.errors import CheckpointError, ModelError, SaveFailed
from corerl.models.config import hf_config
from corerl.models.lora import PEFT_CONFIG, PEFT_WEIGHTS
from corerl.models.names import hf_boxes
from corerl.models.readers import INDEX, SINGLE
from corerl.models.tokenizer import character_tokenizer
from corerl_testing.harness import Setup, start, step_at
from corerl_testing.models import tiny_config, write_tiny_model
from tests.driver.saved import DATA, make_config, make_model, recorded, save


def assert_holds(directory: Path, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """transformers loads `directory`, and every parameter is that of `model`, rounded to `dtype`."""
    loaded = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    found, wanted = dict(loaded.named_parameters()), dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    assert {param.dtype for param in found.values()} == {dtype}
    assert [name for name in wanted if not torch.equal(found[name], wanted[name].to(dtype))] == []


def test_exported_chat_templates_have_the_options_as_defaults(tmp_path: Path) -> None:
    template = (
        "{% macro think() %}{% if not brief %}<think>{{ style }}{{ limits.words }}{% endif %}{% endmacro %}"
        "{{ messages[0]['content'] }}{{ think() }}"
    )
    tokenizer = character_tokenizer("0123456789>s")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokens")
    options = {"brief": False, "style": 'it\'s "so"\n', "limits": {"words": 7}}
    model = {**DATA["model"], "tokenizer": str(tmp_path / "tokens")}
    config = make_config(model=model, data={**DATA["data"], "chat": True, "chat_template_options": options})
    written = export(save(tmp_path / "run", config, make_model(config, seed=1), step=2), tmp_path / "model")
    loaded, asked = AutoTokenizer.from_pretrained(written, local_files_only=True), [{"role": "user", "content": "8"}]
    for given in ({}, {"brief": True}, {"style": "-"}):
        wanted = tokenizer.apply_chat_template(asked, tokenize=False, **{**options, **given})
        assert loaded.apply_chat_template(asked, tokenize=False, **given) == wanted
    assert export(
        save(tmp_path / "plain", make_config(model=model), make_model(config, seed=1), step=2), tmp_path / "b"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "b", local_files_only=True).chat_template == template


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OF_ACTOR = {"train": {"precision": "float32"}, "roles": {"actor": {"train": {"precision": "bfloat16"}}}}


@pytest.mark.parametrize(
    ("came_in", "files", "tables", "asked", "dtype"),
    [
        (BF16, "", "float32", "", BF16),
        (BF16, "", "float32", "float32", FP32),
        (FP32, "", "bfloat16", "", BF16),
        (FP32, "", "float32", "", FP32),
        (FP16, "", "float32", "", FP32),
        # The config names no dtype: the files tell.
        (BF16, "one tensor in float32", "float32", "", BF16),
        (FP32, "no dtype", "float32", "", FP32),
        (BF16, "no weights", "float32", "", FP32),
        # A model of fields came in none: the precision of training is that of the role.
        (None, "", "bfloat16", "", BF16),
        (None, "", "float16", "", FP16),
        (None, "", OF_ACTOR, "", BF16),
    ],
)
def test_an_export_has_the_models_or_its_trainings_dtype(
    tmp_path: Path, came_in: torch.dtype | None, files: str, tables: Any, asked: str, dtype: torch.dtype
) -> None:
    tables = {"train": {"precision": tables}} if isinstance(tables, str) else tables
    base = tmp_path / "base"
    if came_in is not None:
        make_model(make_config(), seed=1).to(came_in).save_pretrained(base)
        tables = {**tables, "model": {**DATA["model"], "path": str(base), "config": {}}}
    if files:
        fields = json.loads((base / "config.json").read_text())
        del fields["dtype"]
        (base / "config.json").write_text(json.dumps(fields))
    if files == "no weights":
        (base / "model.safetensors").unlink()
    elif files == "one tensor in float32":
        tensors = load_file(base / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    model, config = make_model(make_config(), seed=2), make_config(**tables)
    assert_holds(export(save(tmp_path, config, model, step=2), tmp_path / "model", dtype=asked), model, dtype)


def test_what_transformers_could_not_load_is_not_exported(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_model(make_config(), seed=1).save_pretrained(base)
    config = make_config(model={**DATA["model"], "path": str(base), "config": {}})
    checkpoint = save(tmp_path, config, make_model(config, seed=2), step=2)
    fields = json.loads((base / "config.json").read_text())
    for change, error, told in (
        ({"hidden_act": "silusilu"}, ModelError, "cannot build a qwen3 model"),
        ({"num_hidden_layers": 3}, CheckpointError, "lacks 'model.layers.2."),
    ):
        (base / "config.json").write_text(json.dumps({**fields, **change, "layer_types": None}))
        with pytest.raises(error, match=told):
            export(checkpoint, tmp_path / "model")
    assert not (tmp_path / "model").exists()


# ---- buffers ---------------------------------------------------------------------------------------------------------

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def of_experts(tmp_path: Path, **tables: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a model whose router has its bias in a buffer, and the weights it was begun from."""
    base = write_tiny_model("glm4-moe", tmp_path / "base")
    own = {"path": str(base), "tokenizer": DATA["model"]["tokenizer"]}
    config = make_config(model=own, **tables)
    partial = begin(tmp_path / "run", 2)
    lora = None if config.lora is None else config.lora.settled({})
    worker, _ = start(Setup(backend="plain", model=str(base), lora=lora))
    worker.save(str(partial / "actor"), step_at(0), False)
    worker.shutdown("saved")
    files = [load_file(file) for file in base.glob("*.safetensors")]
    checkpoint = commit(partial, recorded(config, 2), ranks={"actor": 1})
    return checkpoint, {name: each for held in files for name, each in held.items()}


def test_adapters_beside_buffers_are_exported_alone_or_merged(tmp_path: Path) -> None:
    checkpoint, weights = of_experts(
        tmp_path, lora={"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"], "rslora": False}
    )
    alone = load_file(export(checkpoint, tmp_path / "adapters") / "adapter_model.safetensors")
    assert len(alone) == 8 and all("_proj.lora_" in name for name in alone)
    merged = load_file(export(checkpoint, tmp_path / "merged", merge=True, dtype="bfloat16") / "model.safetensors")
    assert torch.equal(merged[BIAS], weights[BIAS])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(merged[name], weights[name].bfloat16())  # B is zeros


# ---- what is not a directory -----------------------------------------------------------------------------------------


def stream(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every HF tensor through one buffer that is used again, as a weight stream hands them out."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    params, buffer = dict(model.named_parameters()), torch.empty(97 * 64)
    for name, boxes in hf_boxes(model).items():
        for box in boxes:
            view = box.view(params[name].detach())
            yield box.name, buffer[: view.numel()].view(view.shape).copy_(view)
    buffer.fill_(torch.nan)


@pytest.mark.parametrize("shard_bytes", [100_000, 2**30])
def test_an_export_loads_in_transformers_with_every_key(tiny_model: Path, tmp_path: Path, shard_bytes: int) -> None:
    path, tokenizer = tmp_path / "hf", character_tokenizer("abc")
    config = hf_config(ModelConfig(path=str(tiny_model)))
    written = export_directory(
        path, config=config, tokenizer=tokenizer, tensors=stream(tiny_model), shard_bytes=shard_bytes
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert loaded.dtype == torch.float32 and loaded.config.architectures == [type(wanted).__name__]
    assert loaded.state_dict().keys() == wanted.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in wanted.state_dict().items())
    assert AutoTokenizer.from_pretrained(path).encode("cab") == tokenizer.encode("cab")

    files = list(path.glob("*.safetensors"))
    assert written == sum(t.numel() * 4 for file in files for t in load_file(file).values())
    assert (path / INDEX).exists() == (len(files) > 1) == (shard_bytes < written)
    assert (path / SINGLE).exists() == (len(files) == 1)
    assert all(sum(t.numel() * 4 for t in load_file(file).values()) <= shard_bytes for file in files)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_a_failed_export_leaves_the_earlier_one(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = hf_config(ModelConfig(path=str(tiny_models["qwen3"]))), tmp_path / "hf"
    export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.ones(2))])

    rename = os.rename

    def refuses_the_new_one(source: Path, target: Path) -> None:
        if source.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as own:
        own.setattr(os, "rename", refuses_the_new_one)
        with pytest.raises(SaveFailed, match="could not be exported to .*Input/output error"):
            export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.zeros(2))])
    assert torch.equal(load_file(path / SINGLE)["a"], torch.ones(2))
    export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.zeros(2))])
    assert torch.equal(load_file(path / SINGLE)["a"], torch.zeros(2))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_adapters_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path, tensors = tmp_path / "adapters", {"a": torch.ones(2, 3).T, "b": torch.zeros(4)}
    write_adapters(path, tensors, {"r": 3, "lora_alpha": 7.5})
    assert json.loads((path / PEFT_CONFIG).read_text()) == {"r": 3, "lora_alpha": 7.5}

    def assert_as_before() -> None:
        found = load_file(path / PEFT_WEIGHTS)
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert [entry.name for entry in tmp_path.iterdir()] == ["adapters"]

    assert_as_before()
    with pytest.raises(ModelError, match="^'b' has NaN or infinite values as torch.float32; nothing is exported$"):
        write_adapters(path, {**tensors, "b": torch.tensor([1.0, math.nan])}, {})
    assert_as_before()
    with pytest.raises(SaveFailed, match="the model could not be exported to /dev/null/adapters: "):
        write_adapters("/dev/null/adapters", tensors, {})
    write_adapters(path, {"a": torch.zeros(1)}, {"r": 1})
    assert load_file(path / PEFT_WEIGHTS).keys() == {"a"}


def test_a_full_disk_leaves_no_half_written_export(tiny_model: Path, tmp_path: Path) -> None:
    config = hf_config(ModelConfig(path=str(tiny_model)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(SaveFailed, match=r"^the model could not be exported to .*/hf: "):
            export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=stream(tiny_model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    config = tiny_config("llama")
    for dtype, value in ((torch.float32, torch.nan), (torch.bfloat16, -torch.inf), (torch.float16, 1e5)):
        tensors = [("a", torch.ones(2)), ("b.weight", torch.tensor([1.0, value]).to(dtype))]
        told = rf"^'b.weight' has NaN or infinite values as {dtype}; nothing is exported$"
        with pytest.raises(ModelError, match=told):
            export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_kept_tensors_are_written_as_they_are(tmp_path: Path) -> None:
    kept = {"tower": torch.full((64,), torch.nan, dtype=torch.float16), "positions": torch.arange(3)}
    config = AutoConfig.for_model("qwen3")
    tensors = [("a", torch.zeros(2, dtype=torch.bfloat16))]
    export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=tensors, kept=kept.items(), shard_bytes=64)
    held = {name: each for file in (tmp_path / "hf").glob("*.safetensors") for name, each in load_file(file).items()}
    assert held.keys() == {"a", *kept}
    assert all(torch.equal(held[name].view(torch.uint8), each.view(torch.uint8)) for name, each in kept.items())
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16  # of what was trained
