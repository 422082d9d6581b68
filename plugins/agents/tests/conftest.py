"""What tests of episodes share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from attrs import fields_dict

from corerl.data import Prompt
from corerl.engines import SamplingParams
from corerl.rollout import EventLoop, Failure, Rollout
from corerl_agents.chat_server import ChatServer
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import EpisodeFunction
from corerl_agents.sampler import EpisodeSampler
from plugins.agents.tests.oracle import PARAMS, PROMPTS, TOKENIZER, Fails, Oracle, Play, engines
from tests.rollout.samplers import context


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    made = EventLoop("tested")
    yield made
    made.close()


@pytest.fixture(scope="module")
def front(loop: EventLoop) -> Iterator[ChatServer]:
    made = ChatServer(loop, temperature=1.0, top_p=1.0)
    yield made
    made.close()


@pytest.fixture
def sampler(front: ChatServer) -> Callable[..., EpisodeSampler]:
    """One of episodes that a function plays, by what is known of the run and by options."""

    def made(function: Callable[..., Any] | EpisodeFunction, *, generate: Any = None, **known: Any) -> EpisodeSampler:
        if not isinstance(function, EpisodeFunction):
            function = EpisodeFunction(name="mine:play", function=function)
        generate = generate if inspect.iscoroutinefunction(generate) else engines(generate or Oracle())
        own = {name: known.pop(name) for name in known.keys() & fields_dict(EpisodesConfig).keys()}
        run = context(**{"tokenizer": TOKENIZER, "seed": 7, "generate": generate, **known})
        return EpisodeSampler(EpisodesConfig(**own), run, function=function, server=front)

    return made


@pytest.fixture
def play(loop: EventLoop, sampler: Callable[..., EpisodeSampler]) -> Play:
    def played(
        function: Callable[..., Any] | EpisodeFunction,
        *,
        samples: int = 4,
        params: SamplingParams = PARAMS,
        prompts: Sequence[Prompt] = PROMPTS,
        **known: Any,
    ) -> Rollout:
        drawn = sampler(function, **known).sample(prompts, rollout_step=5, samples=samples, params=params)
        return loop.run(drawn)

    return played


@pytest.fixture
def failure(play: Play) -> Fails:
    """That of the only episode that a function plays."""

    def found(function: Callable[..., Any] | EpisodeFunction, **known: Any) -> Failure:
        outcome = play(function, samples=1, prompts=PROMPTS[:1], **known).outcomes[0]
        assert isinstance(outcome, Failure)
        return outcome

    return found
