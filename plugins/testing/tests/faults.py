"""Backends that several checks fail, to see what each check says: 'plugins.testing.tests.faults:KEEPS_A_GRADIENT'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from corerl.config import ClusterInfo, RoleConfig, option
from corerl.plugin import BackendSpec, Capability, Context, Problem
from corerl.types import MicroBatch, Output, ParallelLayout, SaveResult, Step, StepResult
from corerl.weights import Bucket, Chunk
from corerl_testing.broken.backends import LeaksBetweenLongSequences
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
HAS_BFLOAT16 = {each: how for each, how in PLAIN.capabilities.items() if each is not Capability.BFLOAT16}
LEAKS_IN_BFLOAT16 = evolve(faulty("LeaksInBfloat16"), capabilities=HAS_BFLOAT16)
FORGETS_MOMENTS_TO_COME = faulty("ForgetsMomentsToCome")
DROPS_OUT = faulty("DropsOut")
KEEPS_NO_SNAPSHOT = faulty("KeepsNoSnapshot")
FAILS_TO_SAVE = faulty("FailsToSave")
SENDS_LATE = faulty("SendsLate")


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


class LeaksInBfloat16(LeaksBetweenLongSequences):
    def outputs(self, micro: MicroBatch, temperature: float, **asked: Any) -> dict[Output, torch.Tensor]:
        if self.config.train.precision == "bfloat16":
            return super().outputs(micro, temperature, **asked)
        return PlainBackend.outputs(self, micro, temperature, **asked)


class DropsOut(PlainBackend):
    def of_sequences(self, tokens: torch.Tensor, temperature: float, *shown: Any) -> dict[Output, torch.Tensor]:
        found = super().of_sequences(tokens, temperature, *shown)
        return {output: torch.nn.functional.dropout(values, 0.1) for output, values in found.items()}


class KeepsNoSnapshot(PlainBackend):
    @contextlib.contextmanager
    def using(self, snapshot: str) -> Iterator[None]:
        with super().using("" if snapshot == "reference" else snapshot):
            yield


class SendsLate(PlainBackend):
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        self.sent = [evolve(chunk, view=chunk.view.clone()) for chunk in self.weights]
        return super().optimizer_step(step, scale)

    def gather(self, bucket: Bucket, out: torch.Tensor | None, *, chunks: Sequence[Chunk], root: int | None) -> None:
        super().gather(bucket, out, chunks=self.sent, root=root)


class FailsToSave(PlainBackend):
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        raise OSError("no room")


class ForgetsMomentsToCome(PlainBackend):
    def moments_to_come(self) -> int:
        return 0
