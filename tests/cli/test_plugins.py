"""`corerl engines` and `corerl extensions`: the same table as `corerl backends`, of the other kinds of plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import corerl
from corerl.cli.main import main


@pytest.fixture(autouse=True)
def broken_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "corerl_bad-0.3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: corerl-bad\nVersion: 0.3.1\n")
    (metadata / "entry_points.txt").write_text("[corerl.engines]\nbad = a_module_that_is_not_there:SPEC\n")
    monkeypatch.syspath_prepend(tmp_path)


def table(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    lines = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["NAME", "PACKAGE", "VERSION", "API", "STATUS"]
    return {line[0]: line[1:] for line in lines[1:]}


def test_engines_are_listed_with_their_state_and_no_other_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 0
    rows = table(capsys)
    version = corerl.__version__
    assert rows["transformers"] == ["corerl", version, "1.0", "ok: transformers' own generate, on a CPU or a GPU"]
    assert rows["bad"] == [
        "corerl-bad",
        "0.3.1",
        "-",
        "broken: ModuleNotFoundError: No module named 'a_module_that_is_not_there' (corerl doctor bad)",
    ]
    assert not {"plain", "console"} & rows.keys()


def test_extensions_are_listed_for_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["extensions", "--json"]) == 0
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["jsonl"] == {
        "name": "jsonl",
        "distribution": "corerl",
        "version": corerl.__version__,
        "value": "corerl.observability.specs:JSONL",
        "status": "ok",
        "reason": "",
        "api": [1, 0],
        "summary": "metrics.jsonl and samples.jsonl in the run directory",
        "shadowed": [],
    }
    assert not {"transformers", "bad", "plain"} & rows.keys()


@pytest.mark.parametrize("command", ["engines", "extensions"])
def test_listing_loads_neither_torch_nor_ray(command: str) -> None:
    program = (
        f"import sys\nfrom corerl.cli.main import main\nassert main([{command!r}]) == 0\n"
        "assert not {'torch', 'ray', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
