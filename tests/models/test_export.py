from __future__ import annotations

import json
import math
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from corerl.config.schema import ModelConfig
from corerl.driver.export import export_directory, write_adapters
from corerl.errors import ModelError, SaveFailed
from corerl.models.config import hf_config
from corerl.models.lora import PEFT_CONFIG, PEFT_WEIGHTS
from corerl.models.names import hf_boxes
from corerl.models.readers import INDEX, SINGLE
from corerl.models.tokenizer import character_tokenizer
from corerl_testing.models import tiny_config


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
def test_an_export_loads_in_transformers_without_a_missing_or_unexpected_key(
    tiny_model: Path, tmp_path: Path, shard_bytes: int
) -> None:
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


def test_an_export_that_fails_leaves_the_earlier_one_as_it_was(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = hf_config(ModelConfig(path=str(tiny_models["qwen3"]))), tmp_path / "hf"
    export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.ones(2))])

    def full_disk() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(SaveFailed, match="could not be exported to .*No space left"):
        export_directory(path, config=config, tokenizer=None, tensors=full_disk(), shard_bytes=1)
    rename = os.rename

    def refuses_the_new_one(source: Path, target: Path) -> None:
        if source.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as own:
        own.setattr(os, "rename", refuses_the_new_one)
        with pytest.raises(SaveFailed, match="Input/output error"):
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


def test_a_link_to_a_directory_stays_one_export_after_export(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config, path = hf_config(ModelConfig(path=str(tiny_models["qwen3"]))), tmp_path / "run/model"
    for directory in ("run", "large/model"):
        (tmp_path / directory).mkdir(parents=True)
    path.symlink_to(tmp_path / "large/model")
    for value in (1.0, 2.0, 3.0):
        export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.full((2,), value))])
        assert path.is_symlink()
        assert torch.equal(load_file(tmp_path / "large/model" / SINGLE)["a"], torch.full((2,), value))
    assert [entry.name for entry in (tmp_path / "large").iterdir()] == ["model"]


def test_a_disk_that_is_full_amid_a_shard_is_told_and_nothing_half_written_stays(
    tiny_model: Path, tmp_path: Path
) -> None:
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
