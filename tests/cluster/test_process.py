"""Errors on their way out of a process: always one of CoreRL's own, always unpicklable on the other side."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from corerl.cluster.process import THREADS, Process, portable
from corerl.errors import CorerlError, HookFailed, ModelError, SaveFailed, UserError


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process says in its environment how many threads it takes, and here that is the tests'."""
    monkeypatch.setenv(THREADS, os.environ.get(THREADS, "1"))


class TwoArguments(Exception):
    """As libraries have them: pickling keeps `args`, and the constructor wants others."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"code {code}: {text}")


class PluginSaveFailed(SaveFailed):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot write {path}: {reason}")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def arrived(error: Exception) -> CorerlError:
    """As the driver gets it."""
    moved: CorerlError = pickle.loads(pickle.dumps(portable(raised(error), "actor rank 1: train")))
    return moved


def test_a_foreign_error_becomes_one_line_with_its_traceback() -> None:
    error = arrived(TwoArguments(3, "lost\nand more"))
    assert type(error) is HookFailed
    assert error.message == "actor rank 1: train: TwoArguments: code 3: lost"
    assert error.details.startswith("actor rank 1: train\nTraceback (most recent call last):")
    assert error.details.endswith("TwoArguments: code 3: lost\nand more\n")
    assert arrived(KeyError()).message == "actor rank 1: train: KeyError"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((ModelError("no config.json in m"), ModelError), (UserError("what"), UserError)),
        (PluginSaveFailed("/full", "no space"), SaveFailed),  # what a plugin derives, as the nearest of ours
    ],
)
def test_one_of_ours_arrives_with_its_traceback(error: CorerlError, kind: type[CorerlError]) -> None:
    came = arrived(error)
    assert (type(came), came.message, came.exit_status) == (kind, error.message, error.exit_status)
    assert came.details.startswith("actor rank 1: train\nTraceback (most recent call last):")
    assert type(error).__name__ in came.details


def test_a_call_gives_its_value_or_its_error_as_data() -> None:
    process = Process("engine-0", "fractions:Fraction")
    assert process.heartbeat().phase == "process"
    assert process.construct(0, 3, 4).error is None
    assert process.heartbeat().phase == ""
    assert process.call(1, "as_integer_ratio").value == (3, 4)
    failed = process.call(1, "no_such_method")
    assert failed.value is None
    assert isinstance(failed.error, HookFailed)
    assert failed.error.message == (
        "engine-0: no_such_method: AttributeError: 'Fraction' object has no attribute 'no_such_method'"
    )


def test_a_traced_call_returns_its_own_spans() -> None:
    process = Process("engine-0", "tests.cluster.members:Shows", traced=True)
    assert process.construct(0).error is None
    for parts in (2, 3):
        done = process.call(1, "work", parts)
        assert (done.value, [span.name for span in done.spans]) == (parts, [f"part {n}" for n in range(parts)])
        times = [done.started, *(time for span in done.spans for time in (span.started, span.ended)), done.ended]
        assert times == sorted(times)
    failed = process.call(1, "fail")
    assert failed.error is not None and failed.error.message == "ask later"
    assert [span.name for span in failed.spans] == ["in vain"]
    # What shows nothing is traced all the same.
    other = Process("engine-1", "fractions:Fraction", traced=True)
    assert other.construct(0, 3, 4).error is None
    assert other.call(1, "as_integer_ratio").value == (3, 4)


@pytest.mark.parametrize(
    ("neighbors", "quota", "by_ray", "wanted"),
    [
        (3, "max 100000", "1", "4"),
        (1, "max 100000", "1", "12"),
        (16, "max 100000", "1", "1"),
        (1, "800000 100000", "1", "4"),  # a container with the time of eight cores
        (1, "50000 100000", "1", "1"),
        (3, "max 100000", "6", "6"),  # it asked Ray for more
    ],
)
def test_a_process_takes_half_of_its_share_of_the_cores(
    neighbors: int, quota: str, by_ray: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / "environ").write_bytes(b"HOME=/root\0PATH=/bin\0")
    monkeypatch.setattr("corerl.cluster.process.Path", lambda path: tmp_path / path.rpartition("/")[2])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    monkeypatch.setenv(THREADS, by_ray)
    Process("actor rank 0", "nowhere:Nothing", neighbors=neighbors)
    assert os.environ[THREADS] == wanted
    (tmp_path / "environ").unlink()  # as where there is no /proc
    monkeypatch.setenv(THREADS, "7")
    Process("actor rank 0", "nowhere:Nothing", neighbors=neighbors)
    assert os.environ[THREADS] == "7"
    (tmp_path / "environ").write_bytes(b"HOME=/root\0OMP_NUM_THREADS=9\0")
    monkeypatch.setenv(THREADS, "9")
    Process("actor rank 0", "nowhere:Nothing", neighbors=neighbors)
    assert os.environ[THREADS] == "9"


@pytest.mark.parametrize("code", [0, 3, None])
def test_code_that_exits_fails_its_call(code: object) -> None:
    process = Process("actor rank 0", "tests.cluster.members:Leaves")
    assert process.construct(0, code).error is None
    error = process.call(1, "leave").error
    assert isinstance(error, HookFailed)
    assert error.message.startswith("actor rank 0: leave: SystemExit")
    assert "raise SystemExit(self.code)" in error.details


def test_the_working_directory_comes_last_on_the_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/driver", "", "/installed"])  # as Ray puts it
    Process("actor rank 0", "nowhere:Nothing", here="/driver")
    assert sys.path == ["/installed", "/driver"]
    monkeypatch.setenv("PYTHONPATH", "/a:/driver")
    monkeypatch.setattr(sys, "path", ["/a", "/driver", "/installed"])
    Process("actor rank 0", "nowhere:Nothing", here="/driver")
    assert sys.path == ["/a", "/driver", "/installed"]  # where the user has put it
