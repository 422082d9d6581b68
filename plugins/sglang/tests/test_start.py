"""What is said before a server is started."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from corerl.config import ModelConfig
from corerl.errors import ConfigError
from corerl.messages import install_hint
from corerl_sglang import start as module
from corerl_sglang.config import SglangConfig
from corerl_sglang.start import start_server
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
