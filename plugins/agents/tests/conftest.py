"""What tests of episodes share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from corerl.data import Prompt
from corerl.engines import SamplingParams
from corerl.pictures import PictureReader
from corerl.rollout import EventLoop, Rollout
from corerl_agents.chat_server import ChatServer
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import EpisodeFunction
from plugins.agents.tests.oracle import PARAMS, PROMPTS, TOKENIZER, Oracle, Play, engines
from plugins.agents.tests.samplers import episode_sampler


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
def play(loop: EventLoop, front: ChatServer) -> Play:
    def sample(
        function: Callable[..., Any] | EpisodeFunction,
        *,
        generate: Callable[..., Any] | None = None,
        samples: int = 4,
        params: SamplingParams = PARAMS,
        prompts: Sequence[Prompt] = PROMPTS,
        calls: int = 1,
        context_length: int = 0,
        tokenizer: PreTrainedTokenizerBase = TOKENIZER,
        told: Callable[[int, int], None] | None = None,
        pictures: PictureReader | None = None,
        **config: Any,
    ) -> Rollout:
        given = isinstance(function, EpisodeFunction)
        mine = function if given else EpisodeFunction(name="mine:play", function=function)
        sampler = episode_sampler(
            tokenizer=tokenizer,
            generate=generate if inspect.iscoroutinefunction(generate) else engines(generate or Oracle()),
            seed=7,
            function=mine,
            server=front,
            config=EpisodesConfig(**config),
            calls=calls,
            context_length=context_length,
            on_progress=told,
            pictures=pictures,
        )
        return loop.run(sampler.sample(prompts, rollout_step=5, samples=samples, params=params))

    return sample
