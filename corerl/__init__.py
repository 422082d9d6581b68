"""Plugin-based training backends for reinforcement-learning post-training of language models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.calls import Future as Future
    from corerl.calls import wait_all as wait_all
    from corerl.config.load import load_config as load_config
    from corerl.config.schema import Config as Config
    from corerl.driver.engines import Engines as Engines
    from corerl.driver.run import Summary as Summary
    from corerl.errors import CorerlError as CorerlError
    from corerl.kinds import MemoryKind as MemoryKind
    from corerl.loop import train as train
    from corerl.trainer.group import StoredBatch as StoredBatch
    from corerl.trainer.group import TrainGroup as TrainGroup
    from corerl.types import AdamSettings as AdamSettings
    from corerl.types import LossSpec as LossSpec
    from corerl.types import Output as Output
    from corerl.types import SampleBatch as SampleBatch
    from corerl.types import Step as Step
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)

__version__ = "0.1.0"
