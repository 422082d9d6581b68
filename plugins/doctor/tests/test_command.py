"""`corerl doctor`: its lines, its JSON and its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from corerl.plugin import Finding, Level
from corerl_doctor import examine as examination
from corerl_testing import main

OK = Finding(level=Level.OK, what="Python 3")
OLD = Finding(level=Level.WARNING, what="torch is old", why="it is slow", fix="pip install torch")
GONE = Finding(level=Level.ERROR, what="no library", why="nothing runs", fix="pip install library")


def finding(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Have the doctor find these; returns what it is asked."""
    asked = []

    def examine(*args: Any, **kwargs: Any) -> Iterator[Finding]:
        asked.append((args, kwargs))
        yield from findings

    monkeypatch.setattr(examination, "examine", examine)
    return asked


def test_each_finding_says_what_why_and_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = finding(monkeypatch, OK, OLD, GONE, GONE)
    assert main(["doctor", "mine"]) == 1
    assert asked == [(("mine",), {"file": "", "overrides": [], "nodes": False, "layers": False, "run_dir": ""})]
    said = capsys.readouterr()
    assert said.err == "corerl: error: no library (and 1 more)\n"
    assert said.out == (
        "ok       Python 3\n"
        "warning  torch is old\n"
        "           why: it is slow\n"
        "           fix: pip install torch\n"
        "error    no library\n"
        "           why: nothing runs\n"
        "           fix: pip install library\n"
        "error    no library\n"
        "           why: nothing runs\n"
        "           fix: pip install library\n"
        "2 errors, 1 warning\n"
    )


def test_warnings_alone_end_with_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finding(monkeypatch, OK, OLD)
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert (said.out.endswith("\n1 warning\n"), said.err) == (True, "")
    finding(monkeypatch, OK)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok       Python 3\nno problems found\n"


def test_json_holds_the_same_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finding(monkeypatch, OK, GONE)
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"level": "ok", "what": "Python 3", "why": "", "fix": ""},
        {"level": "error", "what": "no library", "why": "nothing runs", "fix": "pip install library"},
    ]


def test_overrides_nodes_and_layers_are_of_a_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    asked = finding(monkeypatch, OK)
    file = tmp_path / "run.toml"
    file.write_text('backend.name = "plain"\n')
    assert main(["doctor", "run.steps=1"]) == 2
    assert main(["doctor", "--layers"]) == 2
    assert main(["doctor", "--nodes"]) == main(["doctor", "--config", str(file), "--nodes"]) == 2
    assert capsys.readouterr().err == (
        "corerl: error: 'run.steps=1' is an override, but there is no config; pass --config FILE\n"
        "corerl: error: --layers needs a model; pass --config FILE\n"
        "corerl: error: --nodes needs a cluster; pass --config FILE with cluster.address\n"
        "corerl: error: --nodes needs a cluster; pass --config FILE with cluster.address\n"
    )
    assert main(["doctor", "--config", str(file), "--nodes", "--layers", "cluster.address=auto"]) == 0
    given = {"file": str(file), "overrides": ["cluster.address=auto"], "nodes": True, "layers": True, "run_dir": ""}
    assert asked == [(("",), given)]


def test_a_runs_directory_stands_for_its_config_and_notices(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    asked = finding(monkeypatch, OK)
    config = tmp_path / "config.toml"
    config.write_text('backend.name = "plain"\n')
    assert main(["doctor", str(tmp_path), "run.steps=1"]) == 0
    given = {"file": str(config), "overrides": ["run.steps=1"], "nodes": False, "layers": False}
    assert asked == [(("",), {**given, "run_dir": str(tmp_path)})]
    monkeypatch.chdir(tmp_path)  # without a name, a file of anybody's that is there is none of a run
    assert (main(["doctor"]), main(["doctor", "run.steps=1"])) == (0, 2)
    assert asked[1:] == [(("",), {**given, "file": "", "overrides": [], "run_dir": ""})]
