"""What tests of episodes share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt
from corerl.engines.base import SamplingParams
from corerl.event_loop import EventLoop
from corerl.rollout.agents.chat_server import ChatServer
from corerl.rollout.agents.episodes import EpisodeFunction
from corerl.rollout.agents.sampler import EpisodeSampler
from corerl.rollout.sampler import Rollout
from tests.rollout.agents.oracle import PARAMS, PROMPTS, TOKENIZER, Oracle, Play, engines


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
        function: Callable[..., Any],
        *,
        generate: Callable[..., Any] | None = None,
        samples: int = 4,
        params: SamplingParams = PARAMS,
        prompts: Sequence[Prompt] = PROMPTS,
        calls: int = 1,
        context_length: int = 0,
        tokenizer: PreTrainedTokenizerBase = TOKENIZER,
        told: Callable[[int, int], None] | None = None,
        **config: Any,
    ) -> Rollout:
        sampler = EpisodeSampler(
            tokenizer=tokenizer,
            generate=generate if inspect.iscoroutinefunction(generate) else engines(generate or Oracle()),
            seed=7,
            function=EpisodeFunction(name="mine:play", function=function),
            server=front,
            config=EpisodesConfig(**config),
            calls=calls,
            context_length=context_length,
            told=told,
        )
        return loop.run(sampler.sample(prompts, rollout_step=5, samples=samples, params=params))

    return sample
