"""`corerl options NAME`: a table that can be pasted into a config, and says what each setting is."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from corerl.cli.main import main
from corerl.config.load import load_config
from corerl.plan.resolve import resolve_tables
from corerl.plugin.registry import Kind, installed_names, load
from corerl.plugin.toml_help import SELECTED_BY

RUN = """
[backend]
name = "plain"
[model]
path = "somewhere"
"""
SPEC = """
from attrs import field, frozen
from typing import Literal
from corerl.plugin.spec import {kind}Spec, Process

def option(help, **kwargs):
    return field(metadata={{"help": help}}, **kwargs)

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

SPEC = {kind}Spec(implementation="nowhere:Code", config=Options, api=(2, 0), summary="a {kind} to print"{more})
"""


@pytest.fixture(autouse=True)
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rich`, an engine and an extension of one name, whose settings are of every sort."""
    metadata = tmp_path / "corerl_rich-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: corerl-rich\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(
        "[corerl.engines]\nrich = options_engine:SPEC\n[corerl.extensions]\nrich = options_extension:SPEC\n"
    )
    (tmp_path / "options_engine.py").write_text(SPEC.format(kind="Engine", more=""))
    (tmp_path / "options_extension.py").write_text(SPEC.format(kind="Extension", more=", process=Process.DRIVER"))
    monkeypatch.syspath_prepend(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["options", *argv]) == 0
    return capsys.readouterr().out


def test_each_setting_has_its_help_its_type_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "rich", "--kind", "engine") == (
        "# engine rich (corerl-rich 0.1): a Engine to print\n"
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
    for name in installed_names(kind):
        text = printed(capsys, name, "--kind", kind.noun)
        file = tmp_path / "run.toml"
        file.write_text(RUN + text)
        selecting = [f"{path}={name}" for k, path in SELECTED_BY.items() if k is kind]
        config = resolve_tables(load_config(file, selecting))
        cls = load(kind, name).spec.config
        pasted: Any = config.extensions[0].options if kind is Kind.EXTENSIONS else getattr(config, kind.value)[name]
        assert pasted == cls()


def test_each_default_that_is_set_stands_there_as_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fsdp", "transformers"):
        (tables,) = tomllib.loads(printed(capsys, name)).values()
        cls = load(Kind.BACKENDS if name == "fsdp" else Kind.ENGINES, name).spec.config
        assert tables[name] == {field.name: getattr(cls(), field.name) for field in cls.__attrs_attrs__}


def test_a_command_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    about = f"# command doctor (corerl-doctor {version('corerl-doctor')}): diagnose the installation, a plugin or a run"
    assert printed(capsys, "doctor") == f"{about}\n# there are no settings\n"


def test_a_name_of_several_kinds_asks_which_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "rich"]) == 2
    assert capsys.readouterr().err == (
        "corerl: error: 'rich' is the name of an engine and an extension; write --kind engine or --kind extension\n"
    )
    assert 'name = "rich"\n[extensions.options]\n' in printed(capsys, "rich", "--kind", "extension")


def test_a_name_of_no_kind_is_answered_with_all_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "transformrs"]) == 2
    error = capsys.readouterr().err
    backends = ", ".join(installed_names(Kind.BACKENDS))
    assert error.startswith(f"corerl: error: unknown plugin 'transformrs'; installed backends: {backends}; engines: ")
    assert error.endswith("; did you mean 'transformers'?\n")


def test_a_backend_that_is_not_installed_is_answered_with_how_to_install_it(
    capsys: pytest.CaptureFixture[str], absent_backend: str
) -> None:
    assert main(["options", absent_backend]) == 2
    assert capsys.readouterr().err.endswith("to install 'absent': pip install 'corerl[absent]'\n")


def test_a_module_says_itself_of_which_kind_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "options_engine:SPEC")
    assert tomllib.loads(text) == {
        "engines": {
            "options_engine:SPEC": {
                "mode": "fast",
                "words": {"a b": 'say "c"'},
                "on": True,
                "inner": {"factors": [0.5, 1e-8]},
            }
        }
    }
