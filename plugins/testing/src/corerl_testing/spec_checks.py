"""What holds for the spec of every kind of plugin: checks of backends and of algorithms call these."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import attrs
import pytest

from corerl.config.load import structure, to_plain
from corerl.errors import ConfigError
from corerl.plugin.api import API
from corerl.plugin.registry import Kind, Loaded

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
    assert (finished.returncode, finished.stdout.splitlines()[-1:]) == (0, ["[]"]), finished.stderr


def assert_introduces_itself(loaded: Loaded) -> None:
    """It is for this API, in one line, and names its implementation."""
    major, minor = loaded.spec.api
    assert major == API[0] and 0 <= minor <= API[1]
    assert loaded.spec.summary.strip() and "\n" not in loaded.spec.summary
    assert re.fullmatch(r"[\w.]+:\w+(\.\w+)*", loaded.spec.implementation)


def assert_frozen_and_explained(cls: type) -> None:
    """A config class: frozen attrs, a default and help for each field."""
    assert attrs.has(cls), f"{cls.__name__} is not an attrs class"
    config, again = cls(), cls()
    assert config == again
    for field in attrs.fields(cls):
        assert field.metadata.get("help", "").strip(), f"{field.name} has no help; write it with option(...)"
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(config, "no such option", 1)


def assert_survives_json(cls: type) -> None:
    config = cls()
    plain = to_plain(config)
    assert structure(json.loads(json.dumps(plain)), cls, path="options") == config
    assert structure({}, cls, path="options") == config


def assert_refuses_what_is_wrong(cls: type) -> None:
    """An option that is unknown, or of another type."""
    with pytest.raises(ConfigError, match="no_such_option"):
        structure({"no_such_option": 1}, cls, path="options")
    for field in attrs.fields(attrs.resolve_types(cls)):
        for value in WRONG.get(field.type, ()):
            with pytest.raises(ConfigError, match=field.name):
                structure({field.name: value}, cls, path="options")
        assert any(_refuses(cls, field.name, value) for value in NEVER), (
            f"{field.name} accepts any value; give it a type"
        )


def _refuses(cls: type, name: str, value: Any) -> bool:
    try:
        structure({name: value}, cls, path="options")
    except ConfigError:
        return True
    return False
