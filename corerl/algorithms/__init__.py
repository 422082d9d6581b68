"""Algorithms: what a rollout batch teaches, and to which role. An algorithm in a package of its own relies on the names
here, and on the functions of `advantages`."""

from corerl.algorithms.base import Advantages, Algorithm, ForwardPass, Objective
from corerl.algorithms.losses import LossInputs, LossResult, PolicyTokens, TensorMetric
from corerl.plugin.spec import ACTOR, AlgorithmRun, AlgorithmSpec, Problem, RoleKind

__all__ = [
    "ACTOR",
    "Advantages",
    "Algorithm",
    "AlgorithmRun",
    "AlgorithmSpec",
    "ForwardPass",
    "LossInputs",
    "LossResult",
    "Objective",
    "PolicyTokens",
    "Problem",
    "RoleKind",
    "TensorMetric",
]
