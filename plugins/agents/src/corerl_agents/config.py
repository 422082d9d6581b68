"""`[samplers.episodes]`, and what the driver knows of the sampler before a run; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import evolve, frozen

from corerl.config import above, at_least, between, finite, option
from corerl.errors import ConfigError
from corerl.plugin import Problem, SamplerRun, SamplerSpec

MOST = 16_384  # episodes at once, and rows of one: more are a slip of the hand
MOST_WORKERS = 1024  # likewise
NAME = "[A-Za-z][A-Za-z0-9_]*"  # of a role: also of its variable in a command's environment, and of its metrics
# Options that say who plays, which an environment does itself.
PLAYERS = ("function", "command", "options", "workers", "workers_on", "roles")
AUTO = "auto"  # of `concurrency`


def _number_or_auto(instance: Any, attribute: Any, value: int | str) -> None:
    if value != AUTO:
        between(1, MOST)(instance, attribute, value)


@frozen(kw_only=True)
class EpisodesConfig:
    function: str = option(
        "'module:function' that plays each sample as an episode: it queries the policy over several turns, with tools "
        "in between, at an OpenAI-compatible base URL",
        default="",
    )
    command: tuple[str, ...] = option(
        "in place of a function: a program and its arguments, which plays each episode in a process of its own; "
        "{base_url}, {anthropic_url}, {model}, {api_key} and {prompt_file} are filled in",
        default=(),
    )
    options: Mapping[str, Any] = option("keyword arguments of the function", factory=dict)
    roles: tuple[str, ...] = option(
        "names of the roles that play an episode, such as 'proposer' and 'solver': each has a URL, conversations and a "
        "reward of its own, which is compared with the same role's in the prompt's other episodes; empty: one without "
        "a name",
        default=(),
    )
    workers: int = option(
        "worker processes that call the function, so that what it computes does not hold up the driver; 0: the driver",
        default=0,
        validator=between(0, MOST_WORKERS),
    )
    workers_on: Literal["driver", "cluster"] = option(
        "machines of the workers: the driver's, or all nodes of the Ray cluster at cluster.address, as many on each; "
        "then they run a command too, and the episodes' URLs are at the driver's address in the cluster's network",
        default="driver",
    )
    concurrency: int | Literal["auto"] = option(
        "episodes played in parallel; each takes a thread in the driver, or in a worker, if its function is a plain "
        "one, and a process if it is a command; auto: as many as the engines' caches of keys and values have room for",
        default=256,
        validator=_number_or_auto,
    )
    max_rows: int = option(
        "rows that one episode may have: one, and another for each request that changes earlier messages, begins a "
        "conversation of its own or continues the same messages as another; 1 refuses all of these",
        default=16,
        validator=between(1, MOST),
    )
    tool_calls: str = option(
        "format of the policy's tool calls, which are read from its answers: one of those in docs/agents.md, an "
        "installed one, or 'module:function'; auto: by the tokenizer's response template or chat template; none: left "
        "as text",
        default="auto",
    )
    reasoning: Literal["content", "separate"] = option(
        "where an answer's message has the reasoning: in content, with its tags, or in reasoning_content, as from a "
        "server with a reasoning parser",
        default="content",
    )
    stream_tokens: int = option(
        "tokens of a streamed answer that are sampled before they are sent, and an eighth of a longer one; 0: it is "
        "sampled whole, and sent at its end. Each part is a call of the engines, which read all that is before it",
        default=64,
        validator=at_least(0),
    )
    timeout: float = option(
        "time limit for one episode, in seconds; one that exceeds it gets reward.failed_value",
        default=600.0,
        validator=[above(0), finite],
    )


def check_policy(options: EpisodesConfig, run: SamplerRun) -> Iterator[Problem]:
    """What is wrong with the options that do not say who plays."""
    from corerl_agents.tool_calls import format_of

    if options.concurrency == AUTO and (run.engine is None or not run.engine.cache_use):
        yield Problem(
            "concurrency",
            f"'auto', but the engine {run.rollout.engine!r} does not say how full its cache of keys and values is; set "
            "a number",
        )
    try:
        format_of(options.tool_calls, None)
    except ConfigError as error:
        yield Problem("tool_calls", error.message.removeprefix("samplers.episodes.tool_calls: "))


def check_environment(options: EpisodesConfig, run: SamplerRun) -> Iterator[Problem]:
    """What is wrong with these options, at `episodes` of a sampler whose environment plays the episodes."""
    default = EpisodesConfig()
    for setting in PLAYERS:
        if getattr(options, setting) != getattr(default, setting):
            yield Problem(f"episodes.{setting}", "the environment plays the episodes; remove it")
    yield from (evolve(each, path=f"episodes.{each.path}") for each in check_policy(options, run))


def check(options: EpisodesConfig, run: SamplerRun) -> Iterator[Problem]:
    """Whether the function or the command is there, and all else fits it and the run."""
    from corerl_agents.workers import player_of

    if bool(options.function) == bool(options.command):
        empty = "empty; set it to 'module:function', which plays an episode, or samplers.episodes.command to a program"
        both = "a function and samplers.episodes.command are set, but one of them plays an episode; remove the other"
        yield Problem("function", both if options.command else empty)
        return
    yield from check_policy(options, run)
    if options.workers_on == "cluster":
        if not run.cluster.address:
            one = "the run starts a Ray of this machine alone"
            yield Problem("workers_on", f"'cluster', but cluster.address is empty: {one}; set that, or remove this")
        if not options.workers:
            yield Problem("workers_on", "'cluster', but samplers.episodes.workers is 0; set that, or remove this")
    upper = [name.upper() for name in options.roles]  # as in the environment of a command
    for name in options.roles:
        if not re.fullmatch(NAME, name) or upper.count(name.upper()) > 1:
            yield Problem("roles", f"got {name!r}, wanted names of letters, digits and _, each of them once")
            break
    if options.command:
        if options.workers and options.workers_on == "driver":
            yield Problem(
                "workers",
                "call a function; a command has a process for each episode already; remove it, or set "
                "samplers.episodes.workers_on = 'cluster'",
            )
        if options.options:
            yield Problem(
                "options", "are arguments of a function; write those of a command into samplers.episodes.command"
            )
    player = "command" if options.command else "function"
    try:
        player_of(options)
    except ConfigError as error:
        yield Problem(player, error.message.removeprefix(f"samplers.episodes.{player}: "))


SPEC = SamplerSpec(
    implementation="corerl_agents.sampler:EpisodeSampler",
    config=EpisodesConfig,
    api=(2, 0),
    summary="samples are episodes: a function or a command of yours queries the policy at an OpenAI-compatible URL",
    check=check,
    episodes=True,
)
