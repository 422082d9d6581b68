"""What holds for the spec of every kind of plugin: checks of backends and of algorithms call these."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import attrs

from corerl.config import structure
from corerl.config.toml_text import to_plain
from corerl.errors import ConfigError
from corerl.plugin import API, Kind
from corerl.plugin.registry import Loaded
from corerl_testing.require import require

HEAVY = ("torch", "ray", "transformers")
WRONG: dict[Any, list[Any]] = {bool: ["true", 1], int: ["3", 0.5], float: ["0.5"], str: [3, True]}
NEVER: list[Any] = [{"": [None]}, [[None]], object()]  # hardly any type accepts all of these


def assert_imports_nothing_heavy(kind: Kind, name: str) -> None:
    """In a process of its own, loading the spec imports neither torch nor ray."""
    program = (
        "import sys\n"
        f"sys.path[:0] = {[os.getcwd(), *filter(None, sys.path)]!r}\n"
        "from corerl.plugin.registry import Kind, load\n"
        f"load(Kind.{kind.name}, {name!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    require(finished.returncode == 0, f"the spec of {name} cannot be imported alone: {finished.stderr.strip()}")
    imported = finished.stdout.splitlines()[-1:]
    require(
        imported == ["[]"],
        f"importing the spec of {name} imports {imported[0] if imported else 'nothing that says so'}, expected none of "
        f"{', '.join(HEAVY)}: name the implementation as text, and import in functions what is heavy",
    )


def assert_introduces_itself(loaded: Loaded) -> None:
    """It is for this API, in one line, and names its implementation."""
    major, minor = loaded.spec.api
    require(major == API[0] and 0 <= minor <= API[1], f"the spec has api={loaded.spec.api}, this corerl speaks {API}")
    summary, implementation = loaded.spec.summary, loaded.spec.implementation
    require(summary.strip() and "\n" not in summary, f"the spec's summary is {summary!r}, expected one line")
    require(
        re.fullmatch(r"[\w.]+:\w+(\.\w+)*", implementation),
        f"the spec's implementation is {implementation!r}, expected 'package.module:Class'",
    )


def assert_frozen_and_explained(cls: type) -> None:
    """A config class: frozen attrs, a default and help for each field."""
    require(attrs.has(cls), f"{cls.__name__} is not an attrs class; write @frozen(kw_only=True) from attrs")
    bare = [field.name for field in attrs.fields(cls) if field.init and field.default is attrs.NOTHING]
    require(not bare, f"{cls.__name__} has no default for {', '.join(bare)}; give each option one")
    config, again = cls(), cls()
    require(config == again, f"two configs of defaults differ, {config} and {again}: make defaults by factories")
    for field in attrs.fields(cls):
        require(field.metadata.get("help", "").strip(), f"{field.name} has no help; write it with option(...)")
        require(_is_frozen(config, field.name), f"{cls.__name__}.{field.name} can be set; write @frozen from attrs")
    require(_is_frozen(config, "no such option"), f"{cls.__name__} takes new attributes; write @frozen from attrs")


def _is_frozen(config: Any, name: str) -> bool:
    try:
        setattr(config, name, getattr(config, name, 1))
    except attrs.exceptions.FrozenInstanceError:
        return True
    return False


def assert_survives_json(cls: type) -> None:
    config = cls()
    plain = to_plain(config)
    again: object = structure(json.loads(json.dumps(plain)), cls, path="options")
    require(again == config, f"through JSON the config is {again}, expected {config}: use types that JSON has")
    empty: object = structure({}, cls, path="options")
    require(empty == config, f"the config of an empty table is {empty}, expected the defaults, {config}")


def assert_refuses_what_is_wrong(cls: type) -> None:
    """An option that is unknown, or of another type."""
    text = _refusal(cls, "no_such_option", 1)
    require("no_such_option" in text, f"the unknown option no_such_option = 1 gave {text or 'no error'!r}")
    for field in attrs.fields(attrs.resolve_types(cls)):
        for value in WRONG.get(field.type, ()):
            text = _refusal(cls, field.name, value)
            require(
                field.name in text,
                f"{field.name} = {value!r}, of type {type(value).__name__}, gave {text or 'no error'!r}, expected one "
                "that names the option",
            )
        refused = any(_refusal(cls, field.name, value) for value in NEVER)
        require(refused, f"{field.name} accepts any value; give it a type")


def _refusal(cls: type, name: str, value: Any) -> str:
    """The error of this option; "" if it is accepted."""
    try:
        structure({name: value}, cls, path="options")
    except ConfigError as error:
        return error.message
    return ""
