"""How `launch` starts a server, and ranks that import beside it: of a package `sglang` with the modules for both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from corerl_sglang.arguments import PRELOAD
from corerl_sglang.launch import PRELOADED, SAVER, SET, SET_IF_UNSET, STATIC_SPLITS
from corerl_testing import smallest_config

pytestmark = pytest.mark.processes
SECONDS = 60.0  # against hangs
MODULES = {
    "torch.__init__": "raise ImportError('it takes seconds')",
    "torch.version": "cuda = '13.0'",
    "torch_memory_saver": """
        from contextlib import contextmanager
        from pathlib import Path
        import os

        @contextmanager
        def configure_subprocess():
            os.environ["LD_PRELOAD"] = str(Path(__file__).parent / "LIBRARY")
            yield
            del os.environ["LD_PRELOAD"]
        """,
    "sglang.launch_server": """
        def run_server(args):
            print(args, flush=True)
            from sglang.srt.entrypoints import engine
            engine.launch(args)
        """,
    "sglang.srt.server_args": """
        from dataclasses import dataclass, field

        @dataclass
        class ServerArgs:
            model_path: str
            api_key: str
            tp_size: int = 1
            starts: int = 1
            program: str = ""
            environment: dict = field(default_factory=dict)
            does: str = "tells"
            process: dict = field(default_factory=dict)
        """,
    "sglang.srt.entrypoints.http_server": "from sglang.srt.entrypoints import engine",
    "sglang.srt.entrypoints.engine": """
        import contextlib, json, multiprocessing as mp, os, resource, sys
        from pathlib import Path
        from sglang.srt.managers.scheduler import run_scheduler_process
        from torch_memory_saver import configure_subprocess

        preset = sorted({*SETTINGS} & {*os.environ})  # in the server itself

        def launch(args):
            mp.set_start_method("spawn", force=True)
            if args.program:
                mp.spawn.set_executable(args.program)
            os.environ.update(SETTINGS)
            os.environ.update({"SGLANG_RUN_ID": "now", **args.environment})
            for limit, wanted in ((resource.RLIMIT_NOFILE, 65535), (resource.RLIMIT_STACK, 65535 * 1024)):
                soft, hard = resource.getrlimit(limit)
                if soft < wanted:
                    with contextlib.suppress(ValueError):
                        resource.setrlimit(limit, (wanted, hard))
            told = []
            for _ in range(args.starts):
                reader, writer = mp.Pipe(duplex=False)
                process = mp.Process(target=run_scheduler_process, args=(args, writer), **args.process)
                with configure_subprocess():
                    process.start()
                del writer
                try:
                    told.append(reader.recv())
                except EOFError:
                    told.append({})
                process.join()
                told[-1] |= {"preset": preset, "known": process.pid, "status": process.exitcode, "called": process.name}
            Path(args.model_path, "told.json").write_text(json.dumps(told))
        """,
    "sglang.srt.managers.scheduler": """
        import multiprocessing, os, resource, sys, time
        from pathlib import Path

        here, there = Path(sys.argv[1]), lambda pid: Path("/proc", str(pid)).exists()
        before = [pid for each in here.parent.glob("imported-*") if there(pid := int(each.name.split("-")[1]))]
        at_import = dict(os.environ)
        known = here.exists()
        os.environ["BY_IMPORT"] = "set"
        mine = here.parent / f"imported-{os.getpid()}"
        mine.touch()
        if multiprocessing.parent_process() is not None and (do := here.parent / "first").exists():
            text = do.read_text()
            do.unlink()
            exec(text)

        def run_scheduler_process(args, writer):
            if args.does == "ends":
                sys.exit(5)
            this = multiprocessing.current_process()
            writer.send({
                "pid": os.getpid(), "known_at_import": known, "before": before, "at_import": at_import,
                "now": dict(os.environ),
                "method": multiprocessing.get_start_method(), "name": this.name, "daemon": this.daemon,
                "limits": [resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)],
            })
        """,
}
SETTINGS = {**SET_IF_UNSET, **SET}
LIBRARY = f"{SAVER}_cu13.abi3.so"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts a server for so many ranks; it has no arguments yet."""
    site = tmp_path / "site"
    for name, text in MODULES.items():
        file = site / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).replace("SETTINGS", repr(SETTINGS)).replace("LIBRARY", LIBRARY))
    (site / LIBRARY).touch()  # no library: the loader says so, and goes on
    (own := tmp_path / "own").mkdir()
    servers = []

    def start(ranks: int, *, version: str = PRELOADED, first: str = "") -> subprocess.Popen[bytes]:
        """`first`: what the first process does that imports a rank's module, but for the server."""
        (metadata := site / f"sglang-{version}.dist-info").mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        if first:
            (own / "first").write_text(first)
        with (tmp_path / "log").open("wb") as log:
            servers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "corerl_sglang.launch", str(own / "arguments.json")],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": str(site), PRELOAD: str(ranks)},
                    start_new_session=True,
                )
            )
        return servers[-1]

    yield start
    for server in servers:
        server.communicate()  # closes its standard input, at which it ends


def ended(server: subprocess.Popen[bytes], directory: Path, **more: Any) -> str:
    """The log of a server that got its arguments now, once it has ended, and has said how."""
    config = {**smallest_config("qwen3").to_dict(), "model_type": "qwen3"}
    (directory / "config.json").write_text(json.dumps(config))
    arguments = {"model_path": str(directory), "api_key": "key", **more}
    (directory / "own" / "partial").write_text(json.dumps(arguments))
    os.replace(directory / "own" / "partial", directory / "own" / "arguments.json")
    status = server.wait(SECONDS)
    return f"{(directory / 'log').read_text()}status {status}\n"


def configured(server: subprocess.Popen[bytes], directory: Path, **more: Any) -> Any:
    """What the ranks told a server that got its arguments now, and has ended well."""
    log = ended(server, directory, **more)
    assert log.endswith("status 0\n"), log
    assert "api_key='***'" in log  # SGLang writes its arguments to its log
    return json.loads((directory / "told.json").read_text())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tp_sise": 2}, "SGLang's server has no argument 'tp_sise'; did you mean 'tp_size'?"),
        ({"enable_multimodal": True}, "model.pictures wants SGLang 0.5.17 or later, but 0.5.15 is installed"),
    ],
)
def test_arguments_that_this_sglang_lacks_end_its_server(
    started: Any, tmp_path: Path, more: dict[str, Any], told: str
) -> None:
    assert ended(started(0, version="0.5.15"), tmp_path, **more).endswith(f"{told}\nstatus 1\n")


def imports(directory: Path, count: int) -> set[int]:
    """The processes that have imported, once there are as many."""
    until = time.monotonic() + SECONDS
    while len(found := list((directory / "own").glob("imported-*"))) < count:
        assert time.monotonic() < until, f"{len(found)} processes have imported, of {count}"
        time.sleep(0.02)
    return {int(file.name.split("-")[1]) for file in found}


def reasons(directory: Path) -> list[str]:
    return [line for line in (directory / "log").read_text().splitlines() if line.startswith("corerl:")]


def gone(pids: set[int]) -> bool:
    waited = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(waited, SECONDS)[1]


def test_a_rank_imports_before_the_arguments_are_there(started: Any, tmp_path: Path) -> None:
    server = started(1)
    early = imports(tmp_path, 2) - {server.pid}  # the server's engine imports the rank's module too
    process = {"name": "rank-0", "daemon": True}
    told, later = configured(server, tmp_path, starts=2, environment={"NCCL_ALGO": "tree"}, process=process)
    assert reasons(tmp_path) == []
    assert early == {told["pid"]} and not told["known_at_import"]
    assert later["pid"] not in early and later["known_at_import"]  # the second was not expected
    for each in (told, later):
        assert each["pid"] == each["known"] and each["status"] == 0
        assert each["now"][STATIC_SPLITS] == "true" and each["preset"] == []
        assert each["called"] == each["name"] == "rank-0" and each["daemon"] is True
    same = ("now", "method", "limits")
    assert {name: told[name] for name in same} == {name: later[name] for name in same}
    late = {"SGLANG_RUN_ID": "now", "NCCL_ALGO": "tree"}
    # What is preset is there at the imports as in a process that SGLang starts; what is read late follows.
    assert told["at_import"] | late == {name: later["at_import"][name] for name in told["at_import"] | late}
    assert SETTINGS.items() <= told["at_import"].items()
    assert told["at_import"]["LD_PRELOAD"] == told["now"]["LD_PRELOAD"] == str(tmp_path / "site" / LIBRARY)


@pytest.mark.parametrize(
    ("first", "environment", "why"),
    [
        ("", {"CUDA_VISIBLE_DEVICES": "secret"}, "CUDA_VISIBLE_DEVICES"),
        ("", {"SGLANG_ENABLE_TORCH_COMPILE": "1"}, "SGLANG_ENABLE_TORCH_COMPILE"),
        ("raise ImportError('no such library')", {}, "exit code 1 "),
        ("", {}, "exit code -9 "),
    ],
    ids=["another device", "read early", "dies importing", "dies waiting"],
)
def test_a_rank_that_cannot_be_used_is_started_again(
    started: Any, tmp_path: Path, first: str, environment: dict[str, str], why: str
) -> None:
    server = started(1, first=first)
    (early,) = imports(tmp_path, 2) - {server.pid}
    if why == "exit code -9 ":
        os.kill(early, signal.SIGKILL)
    (told,) = configured(server, tmp_path, environment=environment)
    assert told["pid"] != early and told["status"] == 0
    assert told["before"] == [server.pid]  # what the other had of the GPU is free
    assert environment.items() <= told["at_import"].items()
    (reason,) = reasons(tmp_path)
    assert reason.startswith(f"corerl: process {early}") and why in reason and "secret" not in reason
    assert not first or "no such library" in (tmp_path / "log").read_text()


def test_the_end_of_a_rank_reaches_its_server(started: Any, tmp_path: Path) -> None:
    server = started(1)
    early = imports(tmp_path, 2)
    told, later = configured(server, tmp_path, starts=2, does="ends")
    assert told["known"] in early and later["known"] not in early
    assert told["status"] == later["status"] == 5 and told.keys() == later.keys()


def test_a_rank_that_another_program_starts_is_not_one_that_waits(started: Any, tmp_path: Path) -> None:
    program = tmp_path / "bound.sh"
    program.write_text(f'#!/bin/sh\nBOUND=yes exec {sys.executable} "$@"\n')
    program.chmod(0o700)
    server = started(1)
    early = imports(tmp_path, 2)
    (told,) = configured(server, tmp_path, program=str(program))
    assert told["pid"] not in early and told["known"] == told["pid"] and told["now"]["BOUND"] == "yes"
    assert str(program) in reasons(tmp_path)[0]


@pytest.mark.parametrize(("ranks", "version", "lines"), [(0, PRELOADED, 0), (1, "0.5.18", 1)])
def test_ranks_start_after_their_server_where_so_told_or_unknown(
    started: Any, tmp_path: Path, ranks: int, version: str, lines: int
) -> None:
    server = started(ranks, version=version)
    assert imports(tmp_path, 1) == {server.pid}
    (told,) = configured(server, tmp_path)
    assert told["known_at_import"] and told["status"] == 0
    assert [version in line for line in reasons(tmp_path)] == [True] * lines


def test_nothing_is_left_of_ranks_that_were_not_needed(started: Any, tmp_path: Path) -> None:
    server = started(2)
    waiting = imports(tmp_path, 3) - {server.pid}
    assert configured(server, tmp_path, starts=0) == []
    assert gone(waiting)


def test_a_rank_ends_with_its_server_while_it_imports(started: Any, tmp_path: Path) -> None:
    server = started(1, first="time.sleep(600)")
    waiting = imports(tmp_path, 2) - {server.pid}
    server.kill()  # alone, not its group
    assert gone(waiting)
