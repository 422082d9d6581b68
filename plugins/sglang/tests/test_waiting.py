"""Ranks of a server that import beside it: of a package `sglang` with the modules that start a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from corerl_sglang.launch import STATIC_SPLITS
from corerl_testing import smallest_config

pytestmark = pytest.mark.processes
SECONDS = 60.0  # against hangs
MODULES = {
    "torch_memory_saver": """
        from contextlib import contextmanager
        import os

        @contextmanager
        def configure_subprocess():
            os.environ["SAVER"] = "loaded"
            yield
            del os.environ["SAVER"]
        """,
    "sglang.launch_server": """
        def run_server(args):
            from sglang.srt.entrypoints import engine
            engine.launch(args)
        """,
    "sglang.srt.server_args": """
        from dataclasses import dataclass

        @dataclass
        class ServerArgs:
            model_path: str
            api_key: str
            starts: int
            program: str = ""
        """,
    "sglang.srt.entrypoints.http_server": "from sglang.srt.entrypoints import engine",
    "sglang.srt.entrypoints.engine": """
        import json, multiprocessing as mp, os, sys
        from pathlib import Path
        from sglang.srt.managers.scheduler import run_scheduler_process

        def launch(args):
            mp.set_start_method("spawn", force=True)
            if args.program:
                mp.spawn.set_executable(args.program)
            os.environ["LATE"] = "set"
            told = []
            for _ in range(args.starts):
                reader, writer = mp.Pipe(duplex=False)
                process = mp.Process(target=run_scheduler_process, args=(args, writer))
                process.start()
                told.append({**reader.recv(), "known": process.pid})
                process.join()
                told[-1]["status"] = process.exitcode
            Path(args.model_path, "told.json").write_text(json.dumps(told))
        """,
    "sglang.srt.managers.scheduler": """
        import os, sys
        from pathlib import Path

        here, at_import = Path(sys.argv[1]), dict(os.environ)
        known = here.exists()
        (here.parent / f"imported-{os.getpid()}").touch()

        def run_scheduler_process(args, writer):
            now = dict(os.environ)
            writer.send({"pid": os.getpid(), "known_at_import": known, "at_import": at_import, "now": now})
        """,
}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts a server for so many ranks; it has no arguments yet."""
    for name, text in MODULES.items():
        file = tmp_path / "site" / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    own = tmp_path / "own"
    own.mkdir()
    servers = []

    def start(ranks: int) -> subprocess.Popen[bytes]:
        servers.append(
            subprocess.Popen(
                [sys.executable, "-m", "corerl_sglang.launch", str(own / "arguments.json"), str(ranks)],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
                start_new_session=True,
            )
        )
        return servers[-1]

    yield start
    for server in servers:
        server.communicate()  # closes its standard input, at which it ends


def configured(server: subprocess.Popen[bytes], directory: Path, **more: Any) -> Any:
    """What the ranks told a server that got its arguments now, and has ended."""
    config = {**smallest_config("qwen3").to_dict(), "model_type": "qwen3"}
    (directory / "config.json").write_text(json.dumps(config))
    arguments = {"model_path": str(directory), "api_key": "key", **more}
    (directory / "own" / "partial").write_text(json.dumps(arguments))
    os.replace(directory / "own" / "partial", directory / "own" / "arguments.json")
    assert server.wait(SECONDS) == 0
    return json.loads((directory / "told.json").read_text())


def imports(directory: Path, count: int) -> set[int]:
    """The processes that have imported, once there are as many."""
    until = time.monotonic() + SECONDS
    while len(found := list((directory / "own").glob("imported-*"))) < count:
        assert time.monotonic() < until, f"{len(found)} processes have imported, of {count}"
        time.sleep(0.02)
    return {int(file.name.split("-")[1]) for file in found}


def test_a_rank_imports_before_the_arguments_are_there(started: Any, tmp_path: Path) -> None:
    server = started(1)
    early = imports(tmp_path, 2) - {server.pid}  # the server's engine imports the rank's module too
    told, later = configured(server, tmp_path, starts=2)
    assert early == {told["pid"]} and not told["known_at_import"]
    assert told["at_import"]["SAVER"] == "loaded" and told["at_import"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert later["pid"] not in early and later["known_at_import"]  # the second was not expected
    for each in (told, later):
        assert each["pid"] == each["known"] and each["status"] == 0
        assert each["now"]["LATE"] == "set" and each["now"][STATIC_SPLITS] == "true"


def test_a_rank_that_another_program_starts_is_not_one_that_waits(started: Any, tmp_path: Path) -> None:
    program = tmp_path / "bound.sh"
    program.write_text(f'#!/bin/sh\nBOUND=yes exec {sys.executable} "$@"\n')
    program.chmod(0o700)
    server = started(1)
    early = imports(tmp_path, 2)
    (told,) = configured(server, tmp_path, starts=1, program=str(program))
    assert told["pid"] not in early and told["known"] == told["pid"] and told["now"]["BOUND"] == "yes"


def test_nothing_is_left_of_ranks_that_were_not_needed(started: Any, tmp_path: Path) -> None:
    server = started(2)
    waiting = imports(tmp_path, 3) - {server.pid}
    assert configured(server, tmp_path, starts=0) == []
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in waiting if psutil.pid_exists(pid)], SECONDS)
    assert not alive
