"""Algorithms: what a rollout batch teaches, and to which role."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.algorithms.advantages import broadcast as broadcast
    from corerl.algorithms.advantages import compared as compared
    from corerl.algorithms.advantages import differ as differ
    from corerl.algorithms.advantages import group_advantages as group_advantages
    from corerl.algorithms.advantages import sample_rewards as sample_rewards
    from corerl.algorithms.base import ActorOnly as ActorOnly
    from corerl.algorithms.base import Advantages as Advantages
    from corerl.algorithms.base import Algorithm as Algorithm
    from corerl.algorithms.base import Clip as Clip
    from corerl.algorithms.base import ForwardPass as ForwardPass
    from corerl.algorithms.base import Objective as Objective
    from corerl.algorithms.grpo import GRPO as GRPO
    from corerl.algorithms.grpo import GRPOOptions as GRPOOptions
    from corerl.algorithms.losses import LossInputs as LossInputs
    from corerl.algorithms.losses import LossResult as LossResult
    from corerl.algorithms.losses import PolicyTokens as PolicyTokens
    from corerl.algorithms.losses import TensorMetric as TensorMetric
    from corerl.algorithms.losses import mismatch as mismatch
    from corerl.algorithms.losses import surrogate as surrogate
    from corerl.plugin.spec import ACTOR as ACTOR
    from corerl.plugin.spec import AlgorithmRun as AlgorithmRun
    from corerl.plugin.spec import AlgorithmSpec as AlgorithmSpec
    from corerl.plugin.spec import Problem as Problem
    from corerl.plugin.spec import RoleKind as RoleKind
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
