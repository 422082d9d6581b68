"""`[samplers.episodes]`: what is refused before a run, and where."""

from __future__ import annotations

import pytest

from corerl.config import config_of, structure
from corerl.errors import ConfigError
from corerl.plugin import SamplerRun
from corerl_agents.config import SPEC, EpisodesConfig

CONFIG = config_of({"backend": {"name": "plain"}})
RUN = SamplerRun(rollout=CONFIG.rollout, reward=CONFIG.reward)
FETCH = "examples.two_turn_tool:fetch"


@pytest.mark.parametrize(
    ("options", "path", "text"),
    [
        ({}, "function", "empty; set it to 'module:function', "),
        ({"function": "examples.two_turn_tool:fetsh"}, "function", "'examples.two_turn_tool:fetsh': module "),
        ({"function": FETCH, "options": {"tol": 1}}, "function", f"{FETCH!r} takes (episode: "),
        (
            {"function": FETCH, "command": ["sh"]},
            "function",
            "a function and samplers.episodes.command are set, but one",
        ),
        ({"command": ["sh", "{bas_url}"]}, "command", "unknown placeholder {bas_url} in '{bas_url}'; did you mean "),
        ({"command": ["sh"], "workers": 2}, "workers", "call a function; a command has a process for each episode"),
        ({"command": ["sh"], "options": {"tool": 1}}, "options", "are arguments of a function; write those of a "),
        (
            {"function": FETCH, "roles": ["white", "Black 1"]},
            "roles",
            "got 'Black 1', wanted names of letters, ",
        ),
        ({"function": FETCH, "roles": ["white", "White"]}, "roles", "got 'white', wanted names of letters, digits "),
        (
            {"command": ["sh", "{base_url_wite}"], "roles": ["white"]},
            "command",
            "unknown placeholder {base_url_wite}",
        ),
        ({"function": FETCH, "tool_calls": "hrmes"}, "tool_calls", "unknown format 'hrmes'; known: auto, none, "),
    ],
)
def test_what_cannot_play_is_named_by_its_option(options: dict[str, object], path: str, text: str) -> None:
    (problem,) = SPEC.check(EpisodesConfig(**options), RUN)  # type: ignore[arg-type]
    assert problem.path == path and problem.text.startswith(text)


def test_a_function_that_fits_its_options_has_no_problem() -> None:
    assert list(SPEC.check(EpisodesConfig(function=FETCH, options={"tool": False}), RUN)) == []


@pytest.mark.parametrize("number", [10**9, 2**63 - 1])
def test_an_absurd_number_of_episodes_at_once_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"^episodes.concurrency: must be between 1 and \d+, got {number}"):
        structure({"concurrency": number}, EpisodesConfig, path="episodes")
