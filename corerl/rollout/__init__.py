"""Turn prompts into scored samples: engines, sampler, rewards, sources of batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.rollout.engine import Engine as Engine
    from corerl.rollout.engine import EngineContext as EngineContext
    from corerl.rollout.engine import GenerateRequest as GenerateRequest
    from corerl.rollout.engine import Generation as Generation
    from corerl.rollout.engine import Received as Received
    from corerl.rollout.engine import SamplingParams as SamplingParams
    from corerl.rollout.engine import Told as Told
    from corerl.rollout.engine import unheard as unheard
    from corerl.rollout.episodes import Episode as Episode
    from corerl.rollout.lifecycle import EngineLifecycle as EngineLifecycle
    from corerl.rollout.offered import shape_mismatch as shape_mismatch
    from corerl.rollout.receiving import Receiving as Receiving
    from corerl.rollout.reward_lookup import exact_match as exact_match
    from corerl.rollout.reward_lookup import position_match as position_match
    from corerl.rollout.rewards import Reward as Reward
    from corerl.rollout.sampler import Rollout as Rollout
    from corerl.rollout.sources import Scored as Scored
    from corerl.rollout.transformers_engine import named_views as named_views
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
