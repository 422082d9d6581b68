"""Commands that plugins bring: how they are listed, called, and named if they cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from corerl.cli.main import main
from tests.plugin.conftest import Install

SPEC = """
from corerl.plugin import CommandSpec
SPEC = CommandSpec(implementation="{code}:add_arguments", api={api}, summary="{summary}")
"""
CHECKED = """
from attrs import frozen
from corerl.config import option
from corerl.plugin import CommandSpec

@frozen
class Options:
    whom: str = option("who is greeted", default="you")

SPEC = CommandSpec(implementation="table_code:add", check="table_code:check", api=(2, 2), summary="", config=Options)
"""
TABLE = """
from corerl.config import load_with_table
from corerl.errors import ConfigError
from {table} import Options

def check(file, overrides):
    config, options = load_with_table(file, overrides, table="table", options=Options)
    if options.whom == "nobody":
        raise ConfigError("table.whom: somebody is needed")
    return [f"{{config.backend.name}} greets {{options.whom}}"]
"""
HELLO = """
def add_arguments(parser):
    parser.add_argument("whom")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.set_defaults(run=run)

def run(args):
    print(f"hello {args.whom}", args.overrides)
    return 7
"""
MODULES = {
    "hello_code": HELLO,
    "hello": SPEC.format(code="hello_code", api=(2, 0), summary="greets 100% of you"),
    "table": CHECKED,
    "table_code": TABLE.format(table="commands_table"),
    "later": SPEC.format(code="no_code", api=(3, 0), summary="of another time"),
    "bad": "import a_library_that_is_not_there",
    "absent": SPEC.format(code="no_code", api=(2, 0), summary="has no code"),
    "mute": SPEC.format(code="mute_code", api=(2, 0), summary="has no run"),
    "mute_code": "def add_arguments(parser):\n    pass\n",
    "fails": SPEC.format(code="fails_code", api=(2, 0), summary="fails"),
    "fails_code": "def add_arguments(parser):\n    raise SystemExit(0)\n",
}
POINTS = {
    "corerl-hello": ["hello", "table"],
    "corerl-many": ["later", "bad", "absent", "mute", "fails", "both"],
    "corerl-other": ["both"],
}
WHERE = {"both": "hello"}  # the module of a point, if it has another name


@pytest.fixture(autouse=True)
def installed(install: Install) -> None:
    sources = {f"commands_{name}": re.sub(r"(\w+_code)", r"commands_\1", source) for name, source in MODULES.items()}
    for distribution, points in POINTS.items():
        commands = {name: f"commands_{WHERE.get(name, name)}:SPEC" for name in points}
        install(distribution, {"commands": commands}, version="0.1", **sources)


def shown_help(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The only line on stderr, of a command that ends with status 2."""
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("corerl: error: ")
    return said.err.removeprefix("corerl: error: ").rstrip("\n")


def test_config_check_lets_a_command_check_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "greeting.toml")
    Path(file).write_text("backend.name = 'mine'\n[table]\nwhom = 'all'")
    assert main(["config", "check", file]) == 0
    assert capsys.readouterr() == (f"{file}: ok for corerl table\n", "corerl: note: mine greets all\n")
    for override, said in (
        ("table.whom=nobody", "table.whom: somebody is needed"),
        ("table.whim=you", "table.whim: unknown key; did you mean 'whom'? (override table.whim)"),
        ("table=3", "table: expected table, got integer 3 (override table)"),
        ("run.stepps=3", "run.stepps: unknown key; did you mean 'steps'? (override run.stepps)"),
    ):
        assert error(capsys, "config", "check", file, override) == said


def test_help_lists_all_commands_with_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_help(capsys)
    assert "train train as a configuration specifies" in shown
    assert "hello greets 100% of you" in shown
    assert "later command 'later' (corerl-many 0.1) was written for API 3.0, but this corerl supports 2.2" in shown
    assert "ModuleNotFoundError: No module named 'a_library_that_is_not_there'" in shown
    assert "corerl-many:both greets 100% of you corerl-other:both greets 100% of you" in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "absent",
            "command 'absent' (corerl-many 0.1) cannot be loaded from commands_no_code:add_arguments: ModuleNotFoundE",
        ),
        ("mute", "command 'mute' (corerl-many 0.1): commands_mute_code:add_arguments has not set `run`; it must "),
        (
            "fails",
            "command 'fails' (corerl-many 0.1): commands_fails_code:add_arguments cannot add its arguments: SystemExit",
        ),
        ("helo", "unknown command 'helo'; installed: "),
    ],
)
def test_a_command_that_cannot_be_used_is_one_line(capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    assert error(capsys, name).startswith(said)


def test_debug_shows_where_a_command_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "fails"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said and "commands_fails_code.py" in said
