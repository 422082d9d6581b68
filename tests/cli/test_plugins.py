"""`corerl plugins` lists what is installed and what is wrong with it; `corerl options` prints a plugin's settings."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import corerl
from corerl.cli.main import main
from corerl.config.load import load_config
from corerl.plan.resolve import resolve_tables
from corerl.plugin.registry import Kind, installed_names, load
from corerl_doctor.listing import SELECTED_BY, Status, installed, kinds_of

BROKEN = "import a_library_that_is_not_there"
SPEC = """
from typing import Literal
from attrs import frozen
from corerl.config import option
from corerl.plugin.spec import {kind}Spec, Process

@frozen(kw_only=True)
class Inner:
    factors: tuple[float, ...] = option("of something", default=(0.5, 1e-8))

@frozen(kw_only=True)
class Options:
    mode: Literal["fast", "exact"] = option("how", default="fast")
    limit: int | None = option("bytes at most", default=None)
    inner: Inner = option("what is inside", factory=Inner)
    words: dict[str, str] = option("by name", factory=lambda: {{"a b": 'say "c"'}})
    on: bool = option("whether at all", default=True)

SPEC = {kind}Spec(implementation="nowhere:Code", config=Options, api={api}, summary="a {kind} to print"{more})
"""
REASON = "ModuleNotFoundError: No module named 'a_library_that_is_not_there'"


@pytest.fixture(autouse=True)
def plugins(install: Callable[..., Path]) -> None:
    """Backends `good`, `later` and `bad`, and `rich`, which is an engine and an extension."""
    backend = SPEC.format(kind="Backend", api=(2, 0), more="")
    install("corerl-good", {"backends": {"good": "cli_good:SPEC"}}, version="0.3.1", cli_good=backend)
    later = backend.replace("(2, 0)", "(3, 0)")
    install("corerl-later", {"backends": {"later": "cli_later:SPEC"}}, version="0.3.1", cli_later=later)
    install("corerl-bad", {"backends": {"bad": "cli_bad:SPEC"}}, version="0.3.1", cli_bad=BROKEN)
    install(
        "corerl-rich",
        {"engines": {"rich": "cli_engine:SPEC"}, "extensions": {"rich": "cli_extension:SPEC"}},
        cli_engine=SPEC.format(kind="Engine", api=(2, 0), more=""),
        cli_extension=SPEC.format(kind="Extension", api=(2, 0), more=", process=Process.DRIVER"),
    )


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


# ---- plugins ---------------------------------------------------------------------------------------------------------


def test_the_table_shows_every_backend_with_its_state(capsys: pytest.CaptureFixture[str], absent_backend: str) -> None:
    lines = [line.split(maxsplit=4) for line in printed(capsys, "plugins", "backends").splitlines()]
    assert lines[0] == ["NAME", "PACKAGE", "VERSION", "API", "STATUS"]
    rows = {line[0]: line[1:] for line in lines[1:]}
    assert rows["good"] == ["corerl-good", "0.3.1", "2.0", "ok: a Backend to print"]
    incompatible = "incompatible: written for API 3.0, but this corerl supports 2.2"
    assert rows["later"] == ["corerl-later", "0.3.1", "3.0", incompatible]
    assert rows["bad"] == ["corerl-bad", "0.3.1", "-", f"broken: {REASON} (corerl doctor bad)"]
    assert rows[absent_backend] == ["-", "-", "-", "not installed: pip install 'corerl[absent]'"]
    assert not {"transformers", "console"} & rows.keys()


def test_output_of_an_imported_plugin_goes_to_stderr(
    install: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    install("corerl-loud", {"backends": {"loud": "cli_loud:SPEC"}}, cli_loud="print('hello')\n" + BROKEN)
    assert main(["plugins", "backends", "--json"]) == 0
    shown = capfd.readouterr()
    assert {"good", "bad", "loud"} <= {each["name"] for each in json.loads(shown.out)}
    assert shown.err == "hello\n"


def test_json_holds_the_same_for_programs(capsys: pytest.CaptureFixture[str], absent_backend: str) -> None:
    found = json.loads(printed(capsys, "plugins", "--json"))
    assert list(found) == [kind.value for kind in Kind]
    rows: dict[str, Any] = {row["name"]: row for row in found["backends"]}
    assert rows["good"] == {
        "name": "good",
        "distribution": "corerl-good",
        "version": "0.3.1",
        "value": "cli_good:SPEC",
        "status": "ok",
        "reason": "",
        "api": [2, 0],
        "summary": "a Backend to print",
    }
    hint = "pip install 'corerl[absent]'"
    assert rows[absent_backend] == {"name": "absent", "status": "not installed", "reason": hint}
    assert {row["name"]: row for row in found["extensions"]}["jsonl"]["version"] == corerl.__version__


def test_without_a_kind_each_kind_is_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    sections = [each.splitlines() for each in printed(capsys, "plugins").removesuffix("\n").split("\n\n")]
    assert [section[0] for section in sections] == [kind.value for kind in Kind]
    assert printed(capsys, "plugins", "engines").splitlines() == sections[1][1:]


def test_an_unknown_kind_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "backend"]) == 2
    kinds = ", ".join(kind.value for kind in Kind)
    assert capsys.readouterr().err == (
        f"corerl: error: there are no plugins of kind 'backend'; choose from {kinds}; did you mean 'backends'?\n"
    )


# ---- options ---------------------------------------------------------------------------------------------------------


def test_each_setting_has_its_help_its_type_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "options", "rich", "--kind", "engine") == (
        "# engine rich (corerl-rich 0.1.0): a Engine to print\n"
        '# selected by rollout.engine = "rich"\n'
        "[engines.rich]\n"
        "# how (one of 'fast', 'exact')\n"
        'mode = "fast"\n'
        "# bytes at most (integer; unset)\n"
        "# limit =\n"
        "# by name (table)\n"
        'words = {"a b" = "say \\"c\\""}\n'
        "# whether at all (true or false)\n"
        "on = true\n"
        "\n"
        "# what is inside\n"
        "[engines.rich.inner]\n"
        "# of something (array of numbers)\n"
        "factors = [0.5, 1e-08]\n"
    )


@pytest.mark.parametrize("kind", [Kind.EXTENSIONS, *SELECTED_BY])
def test_what_is_printed_can_be_pasted_and_changes_nothing(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in set(installed_names(kind)) - {"bad", "later"}:
        file = tmp_path / "run.toml"
        text = printed(capsys, "options", name, "--kind", kind.noun)
        file.write_text(f'backend.name = "plain"\nmodel.path = "somewhere"\n{text}')
        selecting = [f"{path}={name}" for k, path in SELECTED_BY.items() if k is kind]
        config = resolve_tables(load_config(file, selecting))
        cls = load(kind, name).spec.config
        pasted: Any = config.extensions[0].options if kind is Kind.EXTENSIONS else getattr(config, kind.value)[name]
        assert pasted == cls()


def test_a_command_without_settings_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    about = f"# command doctor (corerl-doctor {version('corerl-doctor')}): diagnose the installation, a plugin or a run"
    assert printed(capsys, "options", "doctor") == f"{about}\n# there are no settings\n"


def test_a_module_is_of_the_kind_of_its_spec(capsys: pytest.CaptureFixture[str]) -> None:
    tables = tomllib.loads(printed(capsys, "options", "cli_engine:SPEC"))
    assert list(tables["engines"]) == ["cli_engine:SPEC"]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("rich", "'rich' is the name of several plugins; write --kind engine or --kind extension\n"),
        ("train", "'train' is no plugin but a table of core; corerl options FILE.toml shows core's settings\n"),
        ("transformrs", "unknown plugin 'transformrs'; did you mean 'transformers'?\n"),
        ("absent", "to install 'absent': pip install 'corerl[absent]'\n"),
    ],
)
def test_a_name_that_selects_no_plugin_is_one_line(
    name: str, end: str, absent_backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["options", name]) == 2
    assert capsys.readouterr().err.endswith(end)


def test_plugins_of_one_name_or_without_a_spec_are_told_apart(install: Callable[..., Path]) -> None:
    install("other", {"backends": {"good": "cli_good:SPEC"}}, version="2.0", cli_none="SPEC = 3")
    both = [each for each in installed(Kind.BACKENDS) if each.name == "good"]
    assert [(each.status, each.reason) for each in both] == [
        (
            Status.CONFLICT,
            "provided by corerl-good 0.3.1 and other 2.0; choose one by writing 'corerl-good:good' or 'other:good'",
        )
    ] * 2
    assert kinds_of("cli_none:SPEC") == []
