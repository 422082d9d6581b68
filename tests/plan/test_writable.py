from __future__ import annotations

from pathlib import Path

import pytest

from corerl.errors import ConfigError
from corerl.plan.make import make_plan
from corerl.plan.writable import require_writable
from tests.driver.saved import config_in


def test_a_directory_that_cannot_be_written_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    require_writable(tmp_path / "not/there/yet")
    assert not (tmp_path / "not").exists()
    for place in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(ConfigError) as caught:
            make_plan(config_in(place), starting=False)
        assert caught.value.message == (
            f"run.dir: cannot write to {place} ({tmp_path / 'file'}: Not a directory); set another directory"
        )
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(
        ConfigError, match=rf"^run.dir: .*/run \({tmp_path}: Permission denied\); set another directory$"
    ):
        require_writable(tmp_path / "run")
