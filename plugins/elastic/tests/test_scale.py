"""`corerl scale`, against a thread that holds a run's directory and answers as a run does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl_elastic import scaling
from corerl_elastic.scaling import REQUEST, Answer, Request, answer, asked
from corerl_testing import main
from tests.driver.saved import begun, make_config, occupying

pytestmark = pytest.mark.processes  # whatever a plugin's command may do as it is imported is tried in a fork
TOLD = "the resize takes effect after the current step\n"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that a run has written."""
    monkeypatch.setattr(scaling, "LOOK_SECONDS", 0.001)
    return begun(tmp_path, make_config())


@contextlib.contextmanager
def running(run_dir: Path, answers: Answer | None) -> Iterator[list[Request]]:
    """A run that answers what it is asked for, or ends instead; yields the requests that it has taken."""
    taken: list[Request] = []
    there, over = threading.Event(), threading.Event()

    def run() -> None:
        with occupying(run_dir):
            there.set()
            while not over.wait(0.001):
                if (request := asked(run_dir)) is None:
                    continue
                taken.append(request)
                if answers is None:
                    return
                answer(run_dir, request, answers)

    thread = threading.Thread(target=run)
    thread.start()
    assert there.wait(60.0)
    try:
        yield taken
    finally:
        over.set()
        thread.join()


def test_what_a_run_was_asked_and_changed_is_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(run_dir, Answer(changed=("engines: 2 -> 1", "actor: 1 rank -> 2 ranks"))) as taken:
        assert main(["scale", str(run_dir), "roles.actor.ranks=2", "rollout.replicas=1"]) == 0
    assert [request.overrides for request in taken] == [("roles.actor.ranks=2", "rollout.replicas=1")]
    assert capsys.readouterr() == ("engines: 2 -> 1\nactor: 1 rank -> 2 ranks\n", TOLD)
    assert not (run_dir / REQUEST).exists()


def test_sizes_that_a_run_has_already_are_told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(run_dir, Answer(changed=())):
        assert main(["scale", str(run_dir), "rollout.replicas=1"]) == 0
    assert capsys.readouterr() == ("nothing to change: these are the sizes already\n", TOLD)


def test_a_rejected_resize_exits_with_status_2(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(run_dir, Answer(changed=("engines: 2 -> 1",), error="roles.actor.ranks: no\nrollout.prompts: nor")):
        assert main(["scale", str(run_dir), "roles.actor.ranks=3", "rollout.replicas=1"]) == 2
    out, err = capsys.readouterr()
    assert out == "engines: 2 -> 1\n"
    assert err == f"{TOLD}corerl: error: roles.actor.ranks: no\ncorerl: error: rollout.prompts: nor\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no sizes are given; name some, such as roles.actor.ranks=4 or rollout.replicas=2"),
        (["rollout.replica=2"], "rollout.replica: unknown key; did you mean 'replicas'? (override rollout.replica)"),
        (["train.epochs=2"], "train.epochs: does not change while a run goes on; roles.ROLE.ranks, .backend and "),
    ],
)
def test_a_wrong_request_is_one_line(
    arguments: list[str], line: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(run_dir), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"corerl: error: {line}") and err.count("\n") == 1
    assert asked(run_dir) is None


def test_a_directory_without_a_run_is_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(run_dir), "rollout.replicas=2"]) == 2
    line = f"{run_dir}: no run is running there; set its sizes when you start it"
    assert capsys.readouterr() == ("", f"corerl: error: {line}\n")
    assert main(["scale", str(run_dir / "nowhere"), "rollout.replicas=2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"corerl: error: no run at {run_dir}/nowhere, which does not exist\n")
    (run_dir.parent / "empty").mkdir()
    assert main(["scale", str(run_dir.parent / "empty"), "rollout.replicas=2"]) == 2
    line = f"{run_dir.parent}/empty is not a run's directory: it has no config.toml"
    assert capsys.readouterr() == ("", f"corerl: error: {line}\n")
    assert err.count("\n") == 1 and not (run_dir / "nowhere").exists()
