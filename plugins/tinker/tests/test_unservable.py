"""Configs with which nothing can be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.errors import ConfigError
from plugins.tinker.tests.served import serving


def test_a_server_whose_sums_would_be_means_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm.aggregation"):
        with serving(tmp_path, {"algorithm": {"aggregation": "sequence-mean"}}):
            pytest.fail("it has started")
