"""A package with an environment of OpenEnv, laid out as the library does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("openenv") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test-openenv` has the library

APP = '''
"""Begin with the letter that is shown: each time is worth 1, and 2 turns are an episode."""

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Said(Action):
    letter: str


class Shown(Observation):
    text: str = ""


class Letters(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, first="abcd", refused="!", **_):
        self.asked, self.turns, self.refused = first[seed % len(first)], 0, refused
        return Shown(text=self.asked)

    def step(self, action, timeout_s=None, **_):
        if action.letter == self.refused:
            raise ValueError("no such letter")
        self.turns += 1
        return Shown(text=self.asked, reward=float(action.letter[:1] == self.asked), done=self.turns == 2)

    @property
    def state(self):
        return State()


app = create_app(Letters, Said, Shown, env_name="letters", max_concurrent_envs=64)
'''


@pytest.fixture(autouse=True)
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package `my_letters`."""
    package = tmp_path / "site" / "my_letters" / "server"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").write_text("")
    (package / "app.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "my_letters"]:
        del sys.modules[name]
