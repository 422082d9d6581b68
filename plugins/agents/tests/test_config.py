"""`[samplers.episodes]`: what is refused before a run, and where."""

from __future__ import annotations

import pytest
from attrs import evolve

from corerl.config import config_of
from corerl.plugin import EngineSpec, SamplerRun
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
        ({"function": FETCH, "command": ["sh"]}, "function", "a function and samplers.episodes.command are set,"),
        ({"command": ["sh", "{bas_url}"]}, "command", "unknown placeholder {bas_url} in '{bas_url}'; did you mean "),
        ({"command": ["sh"], "workers": 2}, "workers", "call a function; a command has a process for each episode"),
        ({"function": FETCH, "workers_on": "cluster", "workers": 2}, "workers_on", "'cluster', but cluster.address"),
        ({"command": ["sh"], "options": {"tool": 1}}, "options", "are arguments of a function; write those of a "),
        ({"function": FETCH, "roles": ["white", "Black 1"]}, "roles", "got 'Black 1', wanted names of letters, "),
        ({"function": FETCH, "roles": ["white", "White"]}, "roles", "got 'white', wanted names of letters, digits "),
        ({"command": ["sh", "{base_url_wite}"], "roles": ["white"]}, "command", "unknown placeholder {base_url_wite}"),
        ({"function": FETCH, "tool_calls": "hrmes"}, "tool_calls", "unknown format 'hrmes'; known: auto, none, "),
    ],
)
def test_what_cannot_play_is_named_by_its_option(options: dict[str, object], path: str, text: str) -> None:
    (problem,) = SPEC.check(EpisodesConfig(**options), RUN)  # type: ignore[arg-type]
    assert problem.path == path and problem.text.startswith(text)


def test_workers_on_a_cluster_play_functions_and_commands() -> None:
    config = config_of({"backend": {"name": "plain"}, "cluster": {"address": "10.0.0.1:6379"}})
    on_nodes = evolve(RUN, cluster=config.cluster)
    for player in ({"function": FETCH}, {"command": ["sh"]}):
        options = EpisodesConfig(workers_on="cluster", workers=2, **player)  # type: ignore[arg-type]
        assert list(SPEC.check(options, on_nodes)) == []
        (problem,) = SPEC.check(evolve(options, workers=0), on_nodes)
        assert problem.path == "workers_on"
        assert problem.text.startswith("'cluster', but samplers.episodes.workers is 0;")


def test_auto_is_refused_where_the_engine_cannot_say() -> None:
    options = EpisodesConfig(function=FETCH, concurrency="auto")
    spec = EngineSpec(implementation="one:Engine", api=(2, 2), summary="one")
    (problem,) = SPEC.check(options, evolve(RUN, engine=spec))
    assert problem.path == "concurrency"
    assert problem.text.startswith("'auto', but the engine 'transformers' does not say how full its cache ")
    assert list(SPEC.check(options, evolve(RUN, engine=evolve(spec, cache_use=True)))) == []
