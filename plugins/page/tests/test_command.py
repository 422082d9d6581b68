"""`corerl view`, up to where its server listens."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from corerl.errors import ConfigError
from corerl_page.command import add_arguments


def view(*words: str | Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([str(word) for word in words])
    args.run(args)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=r"^no run at .*/rums, which does not exist; did you mean .*/runs"):
        view(tmp_path / "rums")
    with pytest.raises(ConfigError, match=r"runs is not a run's directory: it has none of metrics.jsonl, samples"):
        view(tmp_path / "runs")


def test_a_port_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^cannot listen on 127.0.0.1 port {port}: Address already in use; "):
            view(tmp_path, "--port", str(port))
    with pytest.raises(ConfigError, match=r"^cannot listen on port 65536, expected one of 0 to 65535; 0 is"):
        view(tmp_path, "--port", "65536")
