"""`corerl verify`, as a user calls it: in a process of its own, on a part of the suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from corerl_testing import main

ROOT = Path(__file__).resolve().parents[3]


def verify(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from corerl_testing import main; raise SystemExit(main())", "verify", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


@pytest.mark.usefixtures("forked_python")
def test_a_backend_is_verified_by_level_and_reported(tmp_path: Path) -> None:
    done = verify("plain", "--level", "0", "--report", str(tmp_path / "report.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["backend"], report["distribution"], report["levels"]) == ("plain", "corerl-testing", [0])
    assert report["capabilities"]["multi-rank"]["grade"] == "unsupported"
    outcomes = {each["id"]: each["outcome"] for each in report["checks"]}
    assert set(outcomes.values()) == {"passed"} and outcomes.keys() >= {f"C{number:02}" for number in range(1, 10)}
    assert report["summary"]["passed"] == len(report["checks"])
    lines = done.stdout.splitlines()
    assert any(line.startswith("corerl backend: 'plain' (corerl-testing ") for line in lines)
    assert any(line.split() == ["0", str(report["summary"]["passed"]), *"-----"] for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]  # nothing else is left where it was called


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_python")
def test_one_check_runs_with_what_it_builds_on(tmp_path: Path) -> None:
    done = verify("plain", "--level", "1", "--check", "C36", cwd=tmp_path)
    assert done.returncode == 2
    assert "C36 is not among the checks of levels 0 to 1, which are run; ask for another level" in done.stderr
    (tmp_path / "mine.py").write_text(
        "from attrs import evolve, frozen\n"
        "from corerl.config.options import option\n"
        "from corerl_testing.plain import SPEC as PLAIN\n"
        "from corerl_testing.plain.backend import PlainBackend\n"
        "@frozen(kw_only=True)\n"
        "class Config:\n"
        "    fails: bool = option('in a pass', default=False)\n"
        "class Mine(PlainBackend):\n"
        "    def forward_backward(self, batch, loss, outputs, last):\n"
        "        assert not self.config.options.fails, 'asked to'\n"
        "        return super().forward_backward(batch, loss, outputs, last)\n"
        "SPEC = evolve(PLAIN, implementation='mine:Mine', config=Config)\n"
    )
    asked = ["--level", "1", "--check", "C15"]
    reports = []
    for options in ([], ["--option", "fails=true"]):
        report = tmp_path / "report.json"
        done = verify("mine:SPEC", *options, *asked, "--report", str(report), cwd=tmp_path)
        assert done.returncode == bool(options), done.stdout + done.stderr
        reports.append({each["id"]: each["outcome"] for each in json.loads(report.read_text())["checks"]})
    builds_on = {"C02", "C03", "C04", "C06", "C11", "C12", "C14", "C51"}
    assert reports[0] == dict.fromkeys([*builds_on, "C15"], "passed")
    assert reports[1] == {**reports[0], "C12": "failed", "C14": "blocked", "C15": "blocked"}


@pytest.mark.usefixtures("forked_python")
def test_a_backend_in_the_working_directory_is_verified(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from attrs import evolve\n"
        "from corerl_testing.plain import SPEC as PLAIN\n"
        "SPEC = evolve(PLAIN, api=(2, 0))\n"
    )
    done = verify("mine:SPEC", "--level", "0", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("C01 failed: ")]
    assert "the spec imports neither torch nor ray" in line


@pytest.mark.usefixtures("forked_python")
def test_an_algorithm_is_verified_with_its_settings(tmp_path: Path) -> None:
    name, report = "plugins.testing.tests.broken_algorithms:SUM_OF_MEANS", tmp_path / "report.json"
    expected = tmp_path / "expected.toml"
    expected.write_text("A01 = 'the spec is in one file with losses'\n")
    files = ["--report", str(report), "--expected-failures", str(expected)]
    done = verify("--algorithm", name, "algorithm.aggregation=sequence-mean", *files)
    assert done.returncode == 1
    assert "corerl deadlines" not in done.stdout  # of this checkout's conftest.py, which needs tools of the tests
    found = json.loads(report.read_text())
    outcomes = {each["id"]: each["outcome"] for each in found["checks"]}
    assert (outcomes.pop("A01"), outcomes.pop("A15")) == ("expected", "failed")
    assert set(outcomes.values()) == {"passed"} and len(outcomes) == 16
    assert (found["algorithm"], found["value"], found["levels"]) == (name, name, [0, 1])
    lines = done.stdout.splitlines()
    assert any(line.startswith(f"corerl algorithm: {name!r}") for line in lines)
    (line,) = [line for line in lines if line.startswith("A15 failed: ")]
    assert "give TensorMetric the sum over tokens and their number, not their mean" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["plian"], "unknown backend 'plian'; installed: "),
        ([], "verify takes the name of one backend, got none; write corerl verify NAME, or --algorithm NAME"),
        (["plain", "grpo"], "verify takes the name of one backend, got 2 names; "),
        (["plain", "speed=2"], "speed=2: options of a backend are given as --option KEY=VALUE; "),
        (["plain", "--option", "speed=2"], "backends.plain.speed: unknown key; "),
        (["plain", "--option", "speed"], "--option speed: expected KEY=VALUE"),
        (["--algorithm", "grop"], "unknown algorithm 'grop'; installed: "),
        (["--algorithm", "ppo", "algorithms.ppo.whitn=false"], "algorithms.ppo.whitn: unknown key; did you mean 'whi"),
        (["--algorithm", "ppo", "--option", "gamma=1"], "--option gamma=1: is of a backend; write the settings of an "),
        (["plain", "--level", "3"], "level 3 needs a GPU, but torch sees none here; use --level 2, or 4 to skip"),
    ],
)
def test_what_cannot_be_verified_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command puts the working directory there
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["verify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"corerl: error: {line}") and err.count("\n") == 1
