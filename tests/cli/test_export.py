"""`corerl export`, from the command line to a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from corerl.cli.main import main
from corerl.config.load import dump_toml
from corerl.config.schema import LoraConfig
from tests.checkpoint.changes import flip
from tests.driver.adapted import train_adapted
from tests.driver.saved import make_config, make_model, save


def embedding(directory: Path) -> torch.Tensor:
    return load_file(directory / "model.safetensors")["model.embed_tokens.weight"]


def test_a_newer_damaged_checkpoint_is_skipped_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config()
    models = [make_model(config, seed=seed) for seed in (1, 2)]
    _, newest = (save(tmp_path, config, model, step=step) for model, step in zip(models, (2, 10), strict=True))
    file = newest / "actor/rank-00001.safetensors"
    flip(file, next(name for name in load_file(file) if name.startswith("master/")))
    assert main(["export", str(tmp_path), str(tmp_path / "other")]) == 2  # what no tensor tells is seen as it is read
    assert f"{file}: 'master' of " in (told := capsys.readouterr().err)
    assert "is not what was saved (its checksum differs)" in told and not (tmp_path / "other").exists()
    file.unlink()
    assert main(["export", str(tmp_path), str(tmp_path / "model")]) == 0
    out, err = capsys.readouterr()
    assert out == f"wrote {tmp_path}/model\n" and len(err.splitlines()) == 1
    assert err.startswith(f"corerl: skipping step-00000010, using step-00000002: {file} is missing")
    assert torch.equal(embedding(tmp_path / "model"), models[0].get_input_embeddings().weight)


def test_adapters_are_exported_alone_or_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = evolve(make_config(), lora=LoraConfig(rank=3).settled({}))
    checkpoint = train_adapted(tmp_path / "run", config).checkpoint
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "alone")]) == 0
    assert main(["export", str(checkpoint), str(tmp_path / "adapter"), "--adapter", "--dtype", "bfloat16"]) == 0
    assert main(["export", str(checkpoint), str(tmp_path / "merged"), "--merge"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"wrote {tmp_path}/{name}" for name in ("alone", "adapter", "merged")]
    lines = err.splitlines()
    for line, name in zip(lines, ("alone", "adapter"), strict=True):  # whose model has random weights
        start = f"corerl: note: {tmp_path}/{name} has adapters alone, and no directory has their base weights"
        assert line.startswith(start)
        assert line.endswith(f": corerl export {checkpoint} DIRECTORY --merge")
    alone, adapter = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "adapter"))
    assert alone.keys() == adapter.keys() and len(alone) == 2 * 2 * 7
    assert {tensor.dtype for tensor in alone.values()} == {torch.float32}
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == dict(make_model(config, seed=1).named_parameters()).keys()
    for words in (["--adapter", "--merge"], ["--merged"]):
        with pytest.raises(SystemExit) as end:
            main(["export", str(checkpoint), str(tmp_path / "both"), *words])
        assert end.value.code == 2


def test_what_a_group_has_saved_is_exported_with_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = evolve(make_config(), lora=LoraConfig(rank=3).settled({}))
    checkpoint = train_adapted(tmp_path / "run", config).checkpoint
    (tmp_path / "group.toml").write_text(dump_toml(evolve(config, lora=LoraConfig(rank=3))))
    given = ["--config", str(tmp_path / "group.toml"), "--merge"]
    assert main(["export", str(checkpoint), str(tmp_path / "run's"), "--merge"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["export", str(checkpoint / "actor"), str(tmp_path / "adapters"), *given[:2]]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f": corerl export {checkpoint}/actor DIRECTORY --config FILE --merge")
    assert main(["export", str(checkpoint / "actor"), str(tmp_path / "group's"), *given]) == 0
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("run's", "group's"))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    capsys.readouterr()
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "model"), *given]) == 2
    assert main(["export", str(checkpoint / "actor"), str(tmp_path / "model"), *given, "--role", "critic"]) == 2
    nothing, other = capsys.readouterr().err.splitlines()
    assert nothing.startswith(f"corerl: error: no checkpoint at {tmp_path}/nothing, which does not exist")
    assert other == "corerl: error: the config has no role 'critic'; it has: actor"
    assert not (tmp_path / "model").exists()


def test_an_export_to_what_exists_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=2)
    (tmp_path / "taken").mkdir()
    assert main(["export", str(checkpoint), str(tmp_path / "taken")]) == 2
    line = f"corerl: error: {tmp_path}/taken already exists; remove it, or choose another directory\n"
    assert capsys.readouterr() == ("", line)
