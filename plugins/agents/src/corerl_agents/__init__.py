"""Episodes of agents for CoreRL: the policy behind an OpenAI-compatible URL, trained on what it sampled."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl_agents.config import EpisodesConfig as EpisodesConfig
    from corerl_agents.episodes import Episode as Episode
    from corerl_agents.script import scripted as scripted
else:
    from corerl.plugin import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
