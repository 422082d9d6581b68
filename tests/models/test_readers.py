from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from corerl.errors import ModelError
from corerl.models import readers
from corerl.models.build import build_on_meta
from corerl.models.names import hf_boxes, local_chunks
from corerl.models.readers import INDEX, SINGLE, SafetensorsSource
from corerl.weights.chunks import fill
from corerl_testing.models import tiny_config


def test_two_ranks_read_half_of_the_bytes_each_and_never_a_whole_model(tiny_models: dict[str, Path]) -> None:
    directory = tiny_models["qwen3-moe"]
    model = build_on_meta(tiny_config("qwen3-moe"), dtype=torch.float32, attention="sdpa")
    boxes = hf_boxes(model)
    total = sum(4 * p.numel() for p in model.parameters())
    read = []
    for rank in range(2):
        source = SafetensorsSource(directory)
        expected = 0
        for name, param in model.named_parameters():
            size = -(-param.shape[0] // 2)
            start, stop = size * rank, min(size * (rank + 1), param.shape[0])
            local = torch.empty(stop - start, *param.shape[1:])
            expected += local.numel() * 4
            offsets = (start, *(0,) * (param.dim() - 1))
            fill(local_chunks(boxes[name], offsets, tuple(local.shape), local), source, what=str(directory))
        assert source.bytes_read == expected
        assert source.largest_read <= 49 * 64 * 4  # half of the embedding, the largest tensor
        read.append(source.bytes_read)
    assert sum(read) == total
    assert abs(read[0] - read[1]) / total < 0.01  # the vocabulary is odd


@pytest.mark.parametrize("sharded", [True, False])
def test_a_box_is_that_part_of_the_tensor(tiny_models: dict[str, Path], tmp_path: Path, sharded: bool) -> None:
    directory = tiny_models["llama"]
    whole = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    if not sharded:
        save_file(whole, tmp_path / SINGLE)
        directory = tmp_path
    source = SafetensorsSource(directory)
    name = "model.layers.1.mlp.gate_proj.weight"
    assert source.shape(name) == (96, 64)
    assert torch.equal(source.read(name, (10, 5), (7, 9)), whole[name][10:17, 5:14])
    assert (source.bytes_read, source.largest_read) == (7 * 9 * 4, 7 * 9 * 4)


def test_a_single_file_beside_an_index_is_read_as_transformers_reads_it(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    whole = {name: t for file in tiny_models["llama"].glob("*.safetensors") for name, t in load_file(file).items()}
    shutil.copytree(tiny_models["llama"], tmp_path, dirs_exist_ok=True)  # shards, and their index
    name = "model.norm.weight"
    save_file({**whole, name: whole[name] + 1}, tmp_path / SINGLE, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).get_parameter(name)
    ours = SafetensorsSource(tmp_path)
    assert torch.equal(ours.read(name, (0,), (64,)), theirs)
    assert torch.equal(theirs, whole[name] + 1)
    assert ours.where(name) == ours.where("not there") == tmp_path / SINGLE


def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone.*is not a directory"):
        SafetensorsSource(tmp_path / "gone")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"no weights: expected model\.safetensors or .*, found pytorch_model\.bin"):
        SafetensorsSource(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        SafetensorsSource(tmp_path)
    (tmp_path / SINGLE).unlink()
    save_file({"a": torch.zeros(2)}, tmp_path / "shard.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "other.safetensors", "b": "shard.safetensors"}}')
    with pytest.raises(ModelError, match=r"other\.safetensors is missing, although .*index\.json lists it"):
        SafetensorsSource(tmp_path).shape("a")
    with pytest.raises(ModelError, match=r"shard\.safetensors lacks 'b'"):
        SafetensorsSource(tmp_path).shape("b")
    for text in ("{}", "[" * 20):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ModelError, match=r"index\.json is damaged"):
            SafetensorsSource(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 60, -4])
def test_a_truncated_file_is_named_in_one_line(kept: int, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:kept])
    with pytest.raises(
        ModelError, match=rf"^{tmp_path}/model\.safetensors (is damaged|cannot be read): .*again$"
    ) as caught:
        SafetensorsSource(tmp_path)
    assert "\n" not in caught.value.message


def test_a_file_that_the_machine_cannot_map_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)\nat 0x1")

    (tmp_path / SINGLE).touch()
    monkeypatch.setattr(readers, "safe_open", no_memory)
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: unable to mmap 8 bytes: Cannot allocate"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_named_with_its_file(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    weight = torch.zeros(6, 3, dtype=dtype)
    weight[4, 1] = value
    save_file({"weight": weight, "empty": torch.zeros(0, 3, dtype=dtype)}, tmp_path / SINGLE)
    source = SafetensorsSource(tmp_path)
    assert source.read("weight", (0, 0), (4, 3)).shape == (4, 3)  # another rank's part
    assert source.read("empty", (0, 0), (0, 3)).numel() == 0
    with pytest.raises(ModelError, match=rf"^{tmp_path}/{SINGLE} has values of 'weight' that are not finite; "):
        source.read("weight", (4, 0), (2, 3))
