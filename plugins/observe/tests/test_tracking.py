from __future__ import annotations

from pathlib import Path

import pytest

from corerl.errors import DataError
from corerl_observe.tracking import Identity, flat, read_config


def test_a_config_is_flat_names_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[train]\nlr = 1e-3\nbetas = [0.9, 0.95]\n[[extensions]]\nname = "jsonl"\n')
    betas = {"train.betas.0": 0.9, "train.betas.1": 0.95}
    assert flat(read_config(tmp_path)) == {"train.lr": 1e-3, **betas, "extensions.0.name": "jsonl"}
    assert read_config(tmp_path / "elsewhere") == {}


def test_an_identity_is_of_a_run_that_goes_on(tmp_path: Path) -> None:
    identity = Identity(tmp_path / "run" / "tracker.json")
    assert identity.read(goes_on=True) == {}
    identity.write(run_id="abc")
    assert Identity(tmp_path / "run" / "tracker.json").read(goes_on=True) == {"run_id": "abc"}
    assert identity.read(goes_on=False) == {}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tracker.json"]


def test_an_identity_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tracker.json"
    for text, why in (("{", "is not valid JSON: "), ("[1]", "is no ")):
        file.write_text(text)
        with pytest.raises(DataError, match=f"^{file} {why}.*; remove it to begin a new run there$"):
            Identity(file).read(goes_on=True)
