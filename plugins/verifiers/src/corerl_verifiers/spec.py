"""`[samplers.verifiers]`, and what the driver knows of the sampler before a run; imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from corerl.config import at_least, option
from corerl.plugin import Problem, SamplerRun, SamplerSpec
from corerl_agents.config import EpisodesConfig, check_environment


@frozen(kw_only=True)
class VerifiersConfig:
    environment: str = option("a taskset of verifiers: an installed package, or one of its own", default="")
    args: Mapping[str, Any] = option("settings of the taskset, such as {task = {...}}", factory=dict)
    env: Mapping[str, Any] = option(
        "all else of an [env] of verifiers, such as {agent = {max_turns = 4}}; agents run in the runtime subprocess "
        "unless it names another",
        factory=dict,
    )
    harness: str = option(
        "the harness of agents that have none of their own; null talks and calls the tasks' tools; bash also runs "
        "commands of the policy, on this machine",
        default="null",
    )
    tasks: int = option(
        "the first tasks, so many; 0: all, which a taskset without an end does not have",
        default=0,
        validator=at_least(0),
    )
    system: str | None = option(
        "the system message of all tasks, in place of their own; unset: their own; empty: none", default=None
    )
    episodes: EpisodesConfig = option(
        "as [samplers.episodes], but for what plays: function, command, options, workers, roles", factory=EpisodesConfig
    )


def check(options: VerifiersConfig, run: SamplerRun) -> Iterator[Problem]:
    """Whether the library and the environment are there, and it takes its settings."""
    if importlib.util.find_spec("verifiers") is None:
        yield Problem("", "the library verifiers is not installed; python -m pip install 'verifiers>=0.4,<0.5'")
        return
    from corerl_verifiers.environment import problems

    yield from check_environment(options.episodes, run)
    yield from (Problem(*each) for each in problems(options))


def prompts(options: VerifiersConfig) -> list[dict[str, Any]]:
    from corerl_verifiers.environment import rows

    return rows(options)


SPEC = SamplerSpec(
    implementation="corerl_verifiers.sampler:VerifiersSampler",
    config=VerifiersConfig,
    api=(2, 0),
    summary="samples are episodes of an environment of verifiers, with its tasks, harness and rewards",
    check=check,
    prompts=prompts,
    episodes=True,
)
