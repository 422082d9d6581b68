"""Backends that several checks fail, to see what each check says: 'tests.testing.faults:KEEPS_A_GRADIENT'."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from corerl.backend import StateKey
from corerl.config.schema import RoleConfig
from corerl.plugin.context import Context
from corerl.plugin.spec import BackendSpec
from corerl.testing.plain.backend import PlainBackend
from corerl.testing.plain.spec import SPEC as PLAIN
from corerl.types import ParallelLayout
from corerl.weights.chunks import Chunk


def faulty(cls: str) -> BackendSpec:
    return evolve(PLAIN, implementation=f"{__name__}:{cls}")


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
