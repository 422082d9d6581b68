"""`[samplers.openenv]`, and what the driver knows of the sampler before a run; imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from corerl.config import at_least, option
from corerl.plugin import Problem, SamplerRun, SamplerSpec
from corerl_agents.config import EpisodesConfig, check_environment


@frozen(kw_only=True)
class OpenEnvConfig:
    environment: str = option(
        "an installed package, whose server.app:app is started on this machine; 'module:app', another application; or "
        "the address of a server that runs, http://...",
        default="",
    )
    tasks: int = option(
        "prompts: each resets the environment with a seed of its own, from 0", default=1000, validator=at_least(1)
    )
    reset: Mapping[str, Any] = option("further arguments of the environment's reset", factory=dict)
    turns: int = option("actions of an episode, at most", default=32, validator=at_least(1))
    system: str | None = option(
        "the system message; unset: how an action is written, by the environment's schema; empty: none", default=None
    )
    episodes: EpisodesConfig = option(
        "as [samplers.episodes], but for what plays: function, command, options, workers, roles", factory=EpisodesConfig
    )


def application(environment: str) -> str:
    """The ASGI application of a package, as OpenEnv lays it out, or of 'module:app'."""
    return environment if ":" in environment else f"{environment.replace('-', '_')}.server.app:app"


def is_address(environment: str) -> bool:
    return environment.startswith(("http://", "https://"))


def check(options: OpenEnvConfig, run: SamplerRun) -> Iterator[Problem]:
    """Whether the library and the environment's package are there."""
    if importlib.util.find_spec("openenv") is None:
        yield Problem("", "the library openenv is not installed; python -m pip install 'openenv>=0.10'")
    if not options.environment:
        yield Problem("environment", "empty; name an installed package, 'module:app', or the address of a server")
    elif not is_address(options.environment):
        package = application(options.environment).partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            yield Problem("environment", f"no module {package!r} is installed; install it, or give a server's address")
    if "seed" in options.reset:
        yield Problem("reset.seed", "each prompt has a seed of its own; remove it")
    yield from check_environment(options.episodes, run)


def prompts(options: OpenEnvConfig) -> list[dict[str, Any]]:
    return [{"prompt": f"seed {seed}", "seed": seed} for seed in range(options.tasks)]


SPEC = SamplerSpec(
    implementation="corerl_openenv.sampler:OpenEnvSampler",
    config=OpenEnvConfig,
    api=(2, 0),
    summary="samples are episodes in an environment of OpenEnv, which the policy steps turn by turn",
    check=check,
    prompts=prompts,
    episodes=True,
)
