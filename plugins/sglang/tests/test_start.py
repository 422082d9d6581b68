"""What is said before a server is started."""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config import ModelConfig
from corerl.errors import ConfigError
from corerl.messages import install_hint
from corerl_sglang import start as module
from corerl_sglang.arguments import HEALTH_GENERATES
from corerl_sglang.config import SglangConfig
from corerl_sglang.start import preloaded, start_server
from tests.engines.models import context


@pytest.mark.processes
def test_where_sglang_is_not_installed_no_server_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "find_spec", lambda name: {"sglang": None}[name])
    hint = re.escape(install_hint("sglang"))
    with pytest.raises(ConfigError, match=f"^rollout.engine: 'sglang' .* run python -m {hint}"):
        start_server(ModelConfig(), SglangConfig(), context())
    assert list(tmp_path.iterdir()) == []
    launcher = "plugins.sglang.tests.stand_in"  # which may need no SGLang
    own = start_server(ModelConfig(), SglangConfig(launcher=launcher), context())
    own.stop()


@pytest.mark.processes
def test_a_launcher_gets_one_argument_and_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = f"[sys.argv[1:], os.environ[{HEALTH_GENERATES!r}], os.environ['CUDA_VISIBLE_DEVICES']]"
    (tmp_path / "own_launcher.py").write_text(f"import json, os, sys; print(json.dumps({told}))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = evolve(context(), run_dir=str(tmp_path), devices=("3", "GPU-5"))
    own = start_server(ModelConfig(), SglangConfig(launcher="own_launcher"), given)
    try:
        until = time.monotonic() + 60.0
        while own.alive:
            assert time.monotonic() < until
            time.sleep(0.02)
        printed = json.loads((tmp_path / "logs" / "engine-0.log").read_text())
    finally:
        own.stop()
    assert printed == [[str(own.directory / "arguments.json")], "false", "3,GPU-5"]


@pytest.mark.parametrize(
    ("options", "device", "ranks"),
    [
        ({"tensor_parallel": 2}, "cuda", 2),
        ({}, "cpu", 0),
        ({"preload": False}, "cuda", 0),
        ({"launcher": "own_launcher"}, "cuda", 0),
        ({"tensor_parallel": 2, "data_parallel": 2}, "cuda", 0),
    ],
)
def test_ranks_are_preloaded_where_sglangs_own_server_starts_them(
    options: dict[str, Any], device: str, ranks: int
) -> None:
    assert preloaded(SglangConfig(**options), evolve(context(), device=device)) == ranks
