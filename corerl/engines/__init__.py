"""Rollout engines: what one is, and how a run uses several as one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.engines.base import UNLIMITED as UNLIMITED
    from corerl.engines.base import CacheUse as CacheUse
    from corerl.engines.base import Engine as Engine
    from corerl.engines.base import EngineContext as EngineContext
    from corerl.engines.base import GenerateRequest as GenerateRequest
    from corerl.engines.base import Generation as Generation
    from corerl.engines.base import OnFinished as OnFinished
    from corerl.engines.base import PromptScores as PromptScores
    from corerl.engines.base import Received as Received
    from corerl.engines.base import SamplingParams as SamplingParams
    from corerl.engines.base import Watch as Watch
    from corerl.engines.base import ignore as ignore
    from corerl.engines.batching import settle as settle
    from corerl.engines.continuation import append as append
    from corerl.engines.continuation import continued as continued
    from corerl.engines.continuation import split as split
    from corerl.engines.lifecycle import EngineLifecycle as EngineLifecycle
    from corerl.engines.lifecycle import Receiving as Receiving
    from corerl.engines.lifecycle import shape_mismatch as shape_mismatch
    from corerl.engines.stops import Stops as Stops
    from corerl.engines.stops import stops_of as stops_of
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
