"""`corerl plugins` lists what is there of every kind, what is wrong with it, and what could be there."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata as installed
from pathlib import Path
from typing import Any

import pytest

import corerl
from corerl.cli.main import main
from corerl.plugin.registry import Kind

pytestmark = pytest.mark.processes

BROKEN = "import a_library_that_is_not_there"
SPEC = """
from attrs import frozen
from corerl.plugin.spec import BackendSpec

@frozen
class Options:
    pass

SPEC = BackendSpec(implementation="nowhere:Code", config=Options, api={api}, summary="a small backend")
"""


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"good": SPEC.format(api=(2, 0)), "later": SPEC.format(api=(3, 0)), "bad": BROKEN, "no_engine": BROKEN}
    for name, source in modules.items():
        kind = "engines" if name == "no_engine" else "backends"
        metadata = tmp_path / f"corerl_{name}-0.3.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: corerl-{name}\nVersion: 0.3.1\n")
        (metadata / "entry_points.txt").write_text(f"[corerl.{kind}]\n{name} = cli_{name}:SPEC\n")
        (tmp_path / f"cli_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_table_shows_every_backend_with_its_state(capsys: pytest.CaptureFixture[str], absent_backend: str) -> None:
    assert main(["plugins", "backends"]) == 0
    lines = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["NAME", "PACKAGE", "VERSION", "API", "STATUS"]
    rows = {line[0]: line[1:] for line in lines[1:]}
    assert rows["good"] == ["corerl-good", "0.3.1", "2.0", "ok: a small backend"]
    assert rows["later"] == [
        "corerl-later",
        "0.3.1",
        "3.0",
        "incompatible: written for API 3.0, but this corerl supports 2.0",
    ]
    assert rows["bad"] == [
        "corerl-bad",
        "0.3.1",
        "-",
        "broken: ModuleNotFoundError: No module named 'a_library_that_is_not_there' (corerl doctor bad)",
    ]
    assert rows[absent_backend] == ["-", "-", "-", "not installed: pip install 'corerl[absent]'"]


def test_what_a_plugin_prints_is_no_part_of_the_list(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cli_bad.py").write_text("print('hello')\n" + BROKEN)
    assert main(["plugins", "backends", "--json"]) == 0
    shown = capfd.readouterr()
    assert {"good", "bad", "later"} <= {each["name"] for each in json.loads(shown.out)}
    assert shown.err == "hello\n"


def test_a_second_set_of_metadata_that_says_the_same_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = installed.distribution("corerl-good")
    metadata = tmp_path / "corerl_good.egg-info"  # as setuptools leaves beside the source of an editable install
    metadata.mkdir()
    (metadata / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: corerl-good\nVersion: {used.version}\n")
    (metadata / "entry_points.txt").write_text(used.read_text("entry_points.txt") or "")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plugins", "backends"]) == 0
    assert "found twice" not in capsys.readouterr().out


def test_names_that_two_packages_offer_are_conflicts_and_stale_metadata_are_told_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier"
    for distribution, points in (("corerl_good-0.1.egg-info", ""), ("other-2.0.dist-info", "good = cli_good:SPEC")):
        metadata = earlier / distribution
        metadata.mkdir(parents=True)
        name, _, version = distribution.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        for file in ("METADATA", "PKG-INFO"):
            (metadata / file).write_text(text)
        (metadata / "entry_points.txt").write_text(f"[corerl.backends]\n{points}\n")
    monkeypatch.syspath_prepend(earlier)
    assert main(["plugins", "backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rivals = [line.split(maxsplit=4)[1:] for line in lines if line.startswith("good ")]
    reason = "conflict: provided by {} and {}; choose one by writing '{}:good' or '{}:good' (corerl doctor good)"
    assert rivals == [
        ["corerl-good", "0.3.1", "2.0", reason.format("corerl-good 0.3.1", "other 2.0", "corerl-good", "other")],
        ["other", "2.0", "2.0", reason.format("other 2.0", "corerl-good 0.3.1", "other", "corerl-good")],
    ]
    assert lines[-1] == (
        f"corerl-good is found twice; not used: 0.1 in {earlier}/corerl_good-0.1.egg-info (corerl doctor good)"
    )


def test_json_holds_the_same_for_programs(capsys: pytest.CaptureFixture[str], absent_backend: str) -> None:
    assert main(["plugins", "backends", "--json"]) == 0
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["good"] == {
        "name": "good",
        "distribution": "corerl-good",
        "version": "0.3.1",
        "value": "cli_good:SPEC",
        "status": "ok",
        "reason": "",
        "api": [2, 0],
        "summary": "a small backend",
        "shadowed": [],
    }
    assert rows["bad"]["status"] == "broken"
    assert rows[absent_backend] == {
        "name": "absent",
        "status": "not installed",
        "reason": "pip install 'corerl[absent]'",
    }


def test_engines_are_listed_with_their_state_and_no_other_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "engines"]) == 0
    lines = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines[1:]}
    version = corerl.__version__
    assert rows["transformers"] == ["corerl", version, "2.0", "ok: transformers' own generate(), on CPU or GPU"]
    assert rows["no_engine"] == [
        "corerl-no_engine",
        "0.3.1",
        "-",
        "broken: ModuleNotFoundError: No module named 'a_library_that_is_not_there' (corerl doctor no_engine)",
    ]
    assert not {"plain", "console"} & rows.keys()


def test_extensions_are_listed_for_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "extensions", "--json"]) == 0
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["jsonl"] == {
        "name": "jsonl",
        "distribution": "corerl",
        "version": corerl.__version__,
        "value": "corerl.observability.specs:JSONL",
        "status": "ok",
        "reason": "",
        "api": [2, 0],
        "summary": "metrics.jsonl and samples.jsonl in the run directory",
        "shadowed": [],
    }
    assert not {"transformers", "good", "plain"} & rows.keys()


def test_without_a_kind_each_kind_is_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    sections = [section.splitlines() for section in capsys.readouterr().out.removesuffix("\n").split("\n\n")]
    assert [section[0] for section in sections] == [kind.value for kind in Kind]
    for section in sections:
        assert main(["plugins", section[0]]) == 0
        assert capsys.readouterr().out.splitlines() == section[1:]
    assert any(line.startswith("doctor ") for line in {each[0]: each for each in sections}["commands"])


def test_json_of_all_kinds_has_the_array_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [kind.value for kind in Kind]
    for kind, rows in found.items():
        assert main(["plugins", kind, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == rows


def test_an_unknown_kind_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "backend"]) == 2
    kinds = ", ".join(kind.value for kind in Kind)
    assert capsys.readouterr().err == (
        f"corerl: error: there are no plugins of kind 'backend'; choose from {kinds}; did you mean 'backends'?\n"
    )


@pytest.mark.parametrize("kind", ["backends", "engines", "extensions", "commands"])
def test_listing_loads_no_library_that_is_slow_to_import(kind: str) -> None:
    program = (
        f"import sys\nfrom corerl.plugin.registry import Kind, installed\nassert installed(Kind({kind!r}))\n"
        "assert not {'torch', 'ray', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
