"""Backends that several checks fail, to see what each check says: 'plugins.testing.tests.faults:KEEPS_A_GRADIENT'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve, frozen

from corerl.backend import StateKey
from corerl.config.options import option
from corerl.config.schema import ClusterInfo, RoleConfig
from corerl.plugin.context import Context
from corerl.plugin.spec import BackendSpec, Problem
from corerl.types import ParallelLayout
from corerl.weights.chunks import Chunk
from corerl_testing.plain.backend import PlainBackend
from corerl_testing.plain.spec import SPEC as PLAIN


def faulty(cls: str) -> BackendSpec:
    return evolve(PLAIN, implementation=f"{__name__}:{cls}")


@frozen(kw_only=True)
class Split:
    parts: int = option("ranks that hold one model together", default=1)


def whole_models(config: Split, cluster: ClusterInfo) -> Iterable[Problem]:
    if cluster.ranks % config.parts:
        yield Problem("parts", f"{config.parts} does not divide {cluster.ranks} rank(s)")


SPLIT = evolve(PLAIN, config=Split, check=whole_models)  # without a fault
KEEPS_A_GRADIENT = faulty("KeepsAGradient")
HIDES_MOMENTS = faulty("HidesMoments")
FORGETS_MOMENTS_TO_COME = faulty("ForgetsMomentsToCome")


class KeepsAGradient(PlainBackend):
    """Clears all gradients after a step but that of the last norm."""

    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        layout = super().build(config, context)
        self.optimizer.zero_grad = self.clear  # type: ignore[method-assign]
        return layout

    def clear(self, set_to_none: bool = True) -> None:
        for name, param in self.params.items():
            if name != "model.norm.weight":
                param.grad = None


class HidesMoments(PlainBackend):
    """Marks its routers' moments as replicas, of which no rank has the original."""

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        hidden = key in (StateKey.EXP_AVG, StateKey.EXP_AVG_SQ)
        return [
            evolve(chunk, replica=hidden and chunk.name.endswith(".gate.weight")) for chunk in super().local_state(key)
        ]


class ForgetsMomentsToCome(PlainBackend):
    def moments_to_come(self) -> int:
        return 0
