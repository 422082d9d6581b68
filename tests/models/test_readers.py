from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from corerl.errors import ModelError
from corerl.models.readers import INDEX, SINGLE, SafetensorsSource


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


def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone.*is not a directory"):
        SafetensorsSource(tmp_path / "gone")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"no weights: expected model\.safetensors or .*, found pytorch_model\.bin"):
        SafetensorsSource(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        SafetensorsSource(tmp_path)
    (tmp_path / SINGLE).unlink()
    save_file({"a": torch.zeros(2)}, tmp_path / "shard.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "other.safetensors", "b": "shard.safetensors"}}')
    with pytest.raises(ModelError, match=r"other\.safetensors cannot be read: No such file"):
        SafetensorsSource(tmp_path).shape("a")
    with pytest.raises(ModelError, match=r"shard\.safetensors lacks 'b'"):
        SafetensorsSource(tmp_path).shape("b")
    for text in ("{}", "[" * 20):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ModelError, match=r"index\.json is damaged"):
            SafetensorsSource(tmp_path)
