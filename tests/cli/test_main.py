"""The command itself: exit statuses, what goes to stderr, and how little `--help` loads."""

import argparse
import errno
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import corerl
from corerl.cli import main as command
from corerl.cli import main as command_line
from corerl.errors import ConfigError, HookFailed, PluginNotFound, SaveFailed
from corerl.plugin import CommandSpec
from corerl.types import SampleBatch
from tests.machine import paced

outcome: BaseException | Callable[[], int] | int = 0
seen: list[argparse.Namespace] = []


def add_failing(parser: argparse.ArgumentParser) -> None:
    """A command `failing` that raises `outcome`, returns it, or what it returns."""
    parser.set_defaults(run=run)


def add_keeping(parser: argparse.ArgumentParser) -> None:
    """A command `keeping FILE [KEY=VALUE ...] [--flag]` that keeps its arguments."""
    parser.add_argument("file")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--flag", action="store_true")
    parser.set_defaults(run=keep)


def keep(args: argparse.Namespace) -> int:
    seen.append(args)
    return 0


def run(args: argparse.Namespace) -> int:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome if isinstance(outcome, int) else outcome()


@pytest.fixture(autouse=True)
def own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("failing", "keeping"):
        spec = CommandSpec(implementation=f"{__name__}:add_{name}", api=(2, 0), summary="")
        monkeypatch.setitem(command_line.COMMANDS, name, spec)
    seen.clear()


def run_failing(given: BaseException | Callable[[], int] | int, *argv: str) -> int:
    global outcome
    outcome = given
    return command.main(argv or ["failing"])


def hook_failed() -> HookFailed:
    error = HookFailed("rank 1: train raised ValueError: boom")
    error.details = "Traceback of rank 1"
    return error


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("a: b"), 2), (PluginNotFound("a: b"), 2), (SaveFailed("a: b"), 1)]
)
def test_an_error_is_one_line_with_its_status(
    capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    assert run_failing(error) == status
    assert capsys.readouterr() == ("", "corerl: error: a: b\n")


def test_a_workers_traceback_is_hidden_until_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CORERL_DEBUG", raising=False)
    line = "corerl: error: rank 1: train raised ValueError: boom\n"
    assert run_failing(hook_failed()) == 1
    assert capsys.readouterr().err == line
    for argv in (["--debug", "failing"], ["failing", "--debug"]):
        assert run_failing(hook_failed(), *argv) == 1
        shown = capsys.readouterr().err
        assert "Traceback of rank 1" in shown and "raise outcome" in shown and shown.endswith(line)
    monkeypatch.setenv("CORERL_DEBUG", "1")
    assert run_failing(hook_failed()) == 1
    assert "Traceback of rank 1" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["F --flag x", "F --no-such", "F --flag a=1 --no-such=3"])
def test_what_is_neither_option_nor_override_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["keeping", *line.split()])
    assert ended.value.code == 2 and "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "setting"), [("--steps=3", "run.steps"), ("--clip-norm", "train.optimizer.clip_norm"), ("--a.b=3", "a.b")]
)
def test_a_setting_with_dashes_is_named_as_it_is_written(
    word: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["keeping", "F", word])
    hint = f"; settings are written KEY=VALUE, without dashes, such as {setting}=VALUE\n"
    assert capsys.readouterr().err.endswith(hint)


def test_python_m_runs_the_command_and_an_import_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("corerl", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"corerl {corerl.__version__}\n")
    runpy.run_module("corerl.__main__", run_name="__mp_main__")  # as in a process that `multiprocessing` has spawned
    assert capsys.readouterr().out == ""


@pytest.mark.processes
def test_a_reader_that_has_gone_ends_the_command_in_silence() -> None:
    program = "import sys\nfrom corerl.cli.main import main\nsys.exit(main(['options', 'console']))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # long before Python is there
        assert (process.stderr.read(), process.wait()) == (b"", 141)


@pytest.mark.processes
def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("backend.name = 'plain'\ndata.source = 'caf\u00e9.jsonl'\n", encoding="utf-8")
    program = "import sys\nfrom corerl.cli.main import main\nsys.exit(main(['config', 'show', 'run.toml']))"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert 'source = "caf\\xe9.jsonl"' in shown.stdout.splitlines()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argv", "status", "expected", "said"),
    [
        (["--help"], 0, ["train", "export", "config", "plugins", "doctor", "new-backend", "verify"], ""),
        (["--version"], 0, [f"corerl {corerl.__version__}"], ""),
        (["doctor", "--help"], 0, ["usage: corerl doctor"], ""),
        (["config", "show", "run.toml"], 0, ["[backend]", 'name = "plain"'], ""),
        (["train", "run.toml", "run.stepps=3"], 2, [], "corerl: error: run.stepps: unknown key; did you mean 'steps'?"),
    ],
)
def test_what_needs_no_torch_loads_none(
    argv: list[str], status: int, expected: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text('backend.name = "plain"\n')
    program = (
        "import sys\n"
        "from corerl.cli.main import main\n"
        "try:\n"
        f"    status = main({argv!r})\n"
        "except SystemExit as ended:\n"
        "    status = ended.code\n"
        "heavy = {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else status)\n"
    )
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=paced(60))
    assert finished.returncode == status and finished.stderr.startswith(said) and bool(finished.stderr) == bool(said)
    assert [text for text in expected if text not in finished.stdout] == []


# ---- what the machine and others' code do ----------------------------------------------------------------------------


def test_what_the_system_refuses_is_one_line_with_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_failing(OSError(errno.ENOSPC, "No space left on device", "runs/x/\x1b[2J")) == 1
    assert capsys.readouterr().err == "corerl: error: runs/x/\\x1b[2J: No space left on device\n"


def test_a_full_disk_hides_no_error_and_no_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(error: BaseException) -> int:
        print("half an answer")
        raise error

    for error, status in ((ConfigError("a: b"), 2), (KeyboardInterrupt(), 130)):
        with open("/dev/full", "w") as full, monkeypatch.context() as own:
            own.setattr(sys, "stdout", full)
            assert run_failing(partial(answer, error)) == status
            full.flush()  # as Python does at exit
    assert capsys.readouterr().err == "corerl: error: a: b\ncorerl: interrupted\n"


def test_an_exception_of_users_code_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def draw() -> int:
        return len(json.loads("{"))  # raised in a library that the user's code calls

    assert run_failing(draw) == 1
    message = "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    place = f"tests/cli/test_main.py:{draw.__code__.co_firstlineno + 1}"
    assert capsys.readouterr().err == f"corerl: error: {message} ({place}); --debug shows the traceback\n"


def test_an_exception_of_cores_own_propagates() -> None:
    with pytest.raises(ValueError, match="^offsets must increase"):
        run_failing(lambda: len(SampleBatch(tokens=np.arange(5), offsets=np.array([1, 3]))))


COMMAND = [sys.executable, "-c", "import sys; from corerl.cli.main import main; sys.exit(main(['options', 'plain']))"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shell", "status", "said"),
    [
        ('"$@" >/dev/full', 1, "cannot read or write: No space left on device ("),
        ('mkdir gone; cd gone; rmdir ../gone; "$@"', 2, "the working directory does not exist any more; change to one"),
    ],
)
def test_a_full_disk_or_missing_directory_is_one_line(tmp_path: Path, shell: str, status: int, said: str) -> None:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run(["sh", "-c", shell, "sh", *COMMAND], cwd=tmp_path, env=path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1)
    assert done.stderr.startswith(f"corerl: error: {said}")
