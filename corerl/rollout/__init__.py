"""Turn prompts into scored samples: sampler, agents, rewards, sources of batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.rollout.agents.episodes import Episode as Episode
    from corerl.rollout.rewards.base import Reward as Reward
    from corerl.rollout.rewards.lookup import exact_match as exact_match
    from corerl.rollout.rewards.lookup import position_match as position_match
    from corerl.rollout.sampler import Rollout as Rollout
    from corerl.rollout.sources.base import Scored as Scored
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
