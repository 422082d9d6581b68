"""The pages for those who come from another framework name settings that exist, with values that they may have."""

import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from corerl.config.load import load_config
from corerl.config.schema import Config
from corerl.plugin.registry import Kind, installed_names, load
from docs._ext.settings import describe
from tests.docs.test_reference import DOCS

TABLES = "|".join(field.name for field in attrs.fields(Config))
SETTING = re.compile(rf"(?!.*\.json$)((?:{TABLES})(?:\.[a-z_]+)+)(?: = (.+))?")
PLUGINS = {
    "algorithm.name": Kind.ALGORITHMS,
    "backend.name": Kind.BACKENDS,
    "rollout.engine": Kind.ENGINES,
    "rollout.sampler": Kind.SAMPLERS,
    "weights.transport": Kind.TRANSPORTS,
}
OF_PLUGINS = {kind.value: kind for kind in PLUGINS.values()}
SETTINGS = {entry.path.replace("[]", "") for entry in describe(Config)}
FILE = 'backend.name = "fsdp"\n[[eval.sets]]\nsource = "a.jsonl"\n'


def settings_of(cell: str) -> Iterator[tuple[str, str]]:
    """Each setting in a table's cell with a value of it as TOML, or ""; a value by itself is of the last one."""
    last = ""
    for text in re.findall(r"`([^`]+)`", cell):
        if found := SETTING.fullmatch(text):
            last = found[1]
            yield last, found[2] or ""
        elif last and re.fullmatch(r'"[^"]*"|true|false', text):
            yield last, text


def problem(path: str, value: str, file: Path) -> str:
    table, name, *option = path.split(".")
    if kind := OF_PLUGINS.get(table):
        spec = load(kind, name).spec
        return "" if not option or option[0] in attrs.fields_dict(spec.config) else "unknown"
    if not any(known == path or known.startswith(f"{path}.") for known in SETTINGS):
        return "unknown"
    if value and path in PLUGINS:
        return "" if value.strip('"') in (*installed_names(PLUGINS[path]), "auto") else "not installed"
    if value:
        load_config(file, [f"{path}={value}"])
    return ""


@pytest.mark.parametrize("page", ["coming-from.md", "coming-from-verl-or-trl.md"])
def test_settings_and_their_values_exist(page: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    named = [each for row in rows for each in settings_of(row.rstrip("| ").rpartition(" | ")[2])]
    assert len(named) > 50
    assert [(path, value, why) for path, value in named if (why := problem(path, value, file))] == []


@pytest.mark.parametrize(
    ("cell", "wrong"),
    [
        ("`rollout.number`", [("rollout.number", "", "unknown")]),
        ("`engines.sglang.tensor`", [("engines.sglang.tensor", "", "unknown")]),
        ('`algorithm.name = "ppo"`, `"none"`', [("algorithm.name", '"none"', "not installed")]),
        ("`eval.sets`, `roles.critic.train.optimizer.lr`, `backends.fsdp.offload`", []),
    ],
)
def test_a_setting_that_was_renamed_is_found(cell: str, wrong: list[tuple[str, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    assert [(path, value, why) for path, value in settings_of(cell) if (why := problem(path, value, file))] == wrong
