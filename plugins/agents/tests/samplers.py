"""A sampler of episodes, for tests that say of a run only what they are about."""

from __future__ import annotations

from typing import Any

from corerl_agents.chat_server import ChatServer
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import EpisodeFunction
from corerl_agents.sampler import EpisodeSampler
from tests.rollout.samplers import context


def episode_sampler(
    *, function: EpisodeFunction, server: ChatServer, config: EpisodesConfig, **known: Any
) -> EpisodeSampler:
    return EpisodeSampler(config, context(**known), function=function, server=server)
