"""Imports that end their process, as a command meets them: one line and status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.cli import child
from corerl.cli.main import main
from corerl.cli.trial import beside
from corerl.config.load import load_config
from corerl.plan.user_code import code_of
from tests.end_to_end.command import write_small

ENDINGS = {
    "leaves": ("import os\nos._exit(0)\n", "ended its process with status 0"),
    "aborts": ("import os\nos.abort()\n", "killed its process with SIGABRT at "),
    "crashes": ("import ctypes\nctypes.string_at(0)\n", "killed its process with SIGSEGV at "),
}


def try_imports(file: str, overrides: list[str]) -> None:
    code = code_of(load_config(file, overrides))
    beside(code.modules, code.plugins)()


def install_leaves(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose spec ends the process that imports it."""
    metadata = site / "corerl_leaves-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: corerl-leaves\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[corerl.engines]\nleaves = leaves_mod:SPEC\n")
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The working directory, with modules that end their process; returns a sound config in it."""
    monkeypatch.chdir(tmp_path)
    for name, (source, _) in ENDINGS.items():
        (tmp_path / f"{name}_mod.py").write_text(source)
    (tmp_path / "exits_mod.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "odd_mod.py").write_text("class Odd(BaseException): ...\nraise Odd('no\\nway')\n")
    return str(write_small(tmp_path))


@pytest.mark.processes
@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["config", "check", "FILE", "reward.name=MODULE:f"], "importing MODULE "),
        (
            ["train", "FILE", "rollout.sampler=episodes", "samplers.episodes.function=MODULE:f"],
            "importing MODULE ",
        ),
        (["train", "FILE", "extensions=[{name='elastic', options={scaler='MODULE:f'}}]"], "importing MODULE "),
        (["options", "MODULE:SPEC"], "importing MODULE:SPEC, the spec of backend 'MODULE:SPEC', "),
    ],
)
def test_an_import_that_ends_its_process_is_one_line(
    here: str, capsys: pytest.CaptureFixture[str], name: str, argv: list[str], what: str
) -> None:
    module = f"{name}_mod"
    assert main([word.replace("FILE", here).replace("MODULE", module) for word in argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"corerl: error: {what.replace('MODULE', module)}{ENDINGS[name][1]}")
    assert f"; fix {module}" in said.err


@pytest.mark.processes
def test_an_import_that_ends_its_process_is_a_line_beside_keys_that_cannot_be_read(
    here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["run.stepps=3", "model.path=no/model", "reward.name=leaves_mod:f", "rollout.postprocess=exits_mod:f"]
    assert main(["config", "check", here, *wrong]) == 2
    lines = [line.removeprefix("corerl: error: ") for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(": ")[0] for line in lines[:2]] == ["run.stepps", "model.path"]
    assert lines[2:] == ["importing leaves_mod ended its process with status 0; fix leaves_mod"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "said"),
    [("exits_mod", "SystemExit: 0"), ("odd_mod", "Odd: no"), ("absent_mod", "ModuleNotFoundError: ")],
)
def test_an_import_that_raises_anything_is_told_by_who_needs_it(
    here: str, capsys: pytest.CaptureFixture[str], module: str, said: str
) -> None:
    assert main(["config", "check", here, f"reward.name={module}:f"]) == 2
    start = f"corerl: error: reward.name: '{module}:f': cannot import '{module}': {said}"
    assert capsys.readouterr().err.startswith(start)


@pytest.mark.processes
def test_a_working_directory_with_a_models_code_is_refused(
    here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument in (f"model.path={tmp_path}", "model.tokenizer=."):
        assert main(["config", "check", here, argument]) == 2
        setting, _, directory = argument.partition("=")
        assert capsys.readouterr().err == (
            f"corerl: error: {setting}: '{directory}' is the working directory, where modules are looked for, and has "
            "code that may have come with the model (aborts_mod.py, crashes_mod.py, exits_mod.py, and 2 more); run the "
            "command in another directory\n"
        )


@pytest.mark.processes
def test_a_run_of_corerls_own_parts_needs_no_trial(here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(child, "look", lambda *args: asked.append(args) or [])
    plain = ["backend.name=plain", "rollout.engine=fake"]
    try_imports(here, [*plain, "engines.sglang={}", "backends.no-such={}"])  # wheels of CoreRL's are its own parts too
    assert asked == []
    try_imports(here, [*plain, "reward.name=leaves_mod:f"])
    assert asked.pop() == ("corerl.cli.trial:look_imports", ["leaves_mod"], [])
    install_leaves(tmp_path, monkeypatch)
    try_imports(here, [*plain, "engines.leaves={}"])  # tables that are not selected are checked too
    assert asked.pop() == ("corerl.cli.trial:look_imports", [], [("engines", "leaves")])
    assert asked == []


@pytest.mark.processes
def test_plugins_are_listed_although_the_import_of_one_ends_its_process(
    here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_leaves(tmp_path, monkeypatch)
    assert main(["plugins", "engines"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "  ok: " in rows["fake"] and "  ok: " in rows["transformers"]
    said = "importing leaves_mod:SPEC, the spec of engine 'leaves' (corerl-leaves 0.1), ended its process with status 0"
    assert f"broken: {said}" in rows["leaves"]
