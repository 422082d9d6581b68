"""What a backend implements, and what it may override: the primitives that all hooks are built on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import evolve, fields

from corerl.config.schema import OptimizerConfig, RoleConfig
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.models.config import hf_config
from corerl.models.files import initial_source, shapes_of_tower
from corerl.plugin.hooks import Context
from corerl.plugin.host import HostedBackend
from corerl.types import (
    AdamSettings,
    ForwardResult,
    GradientResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    ParallelLayout,
    Step,
    StepResult,
)
from corerl.weights.adapters import is_adapter
from corerl.weights.chunks import Chunk, TensorSource

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from corerl.pictures import PictureInputs, RankTower

ExtraState: TypeAlias = Mapping[str, torch.Tensor | bool | int | float | str]


class StateKey(StrEnum):
    """What `local_state` can be asked for; the last three together make a training checkpoint.

    MASTER is the most precise copy of a parameter that is trained: `param` itself if there is no other. Of a role with
    adapters (`config.lora`), PARAM has these besides the weights, by the names of
    `corerl.weights.adapters_of`, and the others have them and a value head alone. A checkpoint holds `buffers()`
    besides.
    """

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


SAVED = (StateKey.MASTER, StateKey.EXP_AVG, StateKey.EXP_AVG_SQ)


class Primitives(HostedBackend, ABC):
    """One rank's model, optimizer and layout."""

    config: RoleConfig
    context: Context
    layout: ParallelLayout
    weights_version = 0  # the version that engines were last sent
    picture_inputs: PictureInputs | None = None  # makes the inputs of the model's tower, if rows have pictures
    tower: RankTower | None = None  # set by `build` where the backend leaves the tower to the reader of pictures
    phase = ""  # of `init`, while it runs; shown to the user if it takes long
    span: Callable[[str], AbstractContextManager[Any]] = staticmethod(lambda name: nullcontext())  # set in a traced run

    # ---- what a backend must implement ------------------------------------------------------------------------------

    @abstractmethod
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        """Build the model and its optimizer, with parameters allocated but not loaded. torch.distributed is ready.

        A role with adapters (`config.lora`) trains these and a value head; its other weights are in the precision of
        its passes, without masters, gradients and moments. A frozen role (`config.frozen`) has no optimizer, masters or
        gradients, and its weights are in the precision of its passes. Of the other methods only `forward`,
        `local_state` and `tensors` for parameters, `after_load` for parameters and `buffers` are called then.
        """

    @abstractmethod
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        """Add the gradients of the micro-batches, of which there is at least one, to those that are there already.
        Return `outputs` of the same passes, from output ranks. `last` is a hint: no other call comes before
        `optimizer_step`, which may also come without it. Between two calls there may be a `forward`, an
        `update_weights`, and a sleep of all kinds but gradients."""

    @abstractmethod
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        """Multiply the gradients by `scale`, clip them, and take exactly one optimizer step as `optimizer_at` says;
        skip it on all ranks alike if the gradient is not finite. No gradient is left then."""

    @abstractmethod
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        """Compute outputs without gradients. A snapshot may be in place of the weights."""

    @abstractmethod
    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        """The boxes of HF tensors that this rank holds, as writable views. Missing moments are created."""

    @abstractmethod
    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        """Every tensor of that kind on this rank; gathered parameters are released first. Tensors in host memory may be
        included: they do not sleep."""

    @abstractmethod
    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        """Called after the chunks of `keys` were written: sync masters and working copies, set Adam's own step if it is
        given, drop caches. {PARAM} alone is a snapshot swap: leave masters and moments as they are."""

    # ---- what a backend may override --------------------------------------------------------------------------------

    def buffers(self) -> Sequence[Chunk]:
        """The model's stored buffers on this rank, whole: weights that no optimizer steps. They are loaded, saved and
        sent as parameters are, and stay on the device while it sleeps."""
        return ()

    def extra_state(self) -> ExtraState:
        """This rank's other state; restored by the same backend alone. At another world size each rank gets the first
        rank's."""
        return {}

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore what `extra_state` returned."""

    def optimizer_at(self, step: Step) -> OptimizerConfig:
        """`[train.optimizer]` as this step takes it: at its learning rate, and with what `step.adam` sets."""
        own = self.config.train.optimizer
        names = [each.name for each in fields(AdamSettings)] if step.adam is not None else []
        given = {name: value for name in names if (value := getattr(step.adam, name)) is not None}
        return evolve(own, lr=step.lr, **given)

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks of this role."""
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None

    @property
    def device(self) -> torch.device:
        if self.config.device == "cuda":
            return torch.device("cuda", self.context.local_rank)
        return torch.device("cpu")

    def initial_weights(self, chunks: Sequence[Chunk]) -> TensorSource:
        """The source of a fresh run's weights for these chunks."""
        shapes = {chunk.name: chunk.shape for chunk in chunks}
        hf, lora = hf_config(self.config.model), self.config.lora
        return initial_source(self.config.model, hf, shapes, seed=self.config.seed, device=self.device, lora=lora)

    @property
    def weights(self) -> Sequence[Chunk]:
        """All weights of this rank, adapters included: what engines are sent, the latter merged into the former
        unless `weights.lora` is "adapter"."""
        return [*self.held_state(StateKey.PARAM), *self.buffers()]

    def held_state(self, key: StateKey) -> Sequence[Chunk]:
        """`local_state`, and what `tower` holds."""
        own = self.local_state(key)
        return own if self.tower is None else [*own, *self.tower.chunks(key)]

    def trains(self, name: str) -> bool:
        """Whether training changes the HF tensor of that name. Others have no masters and are in no checkpoint."""
        if name in self._names_of_tower:
            return self.config.model.tower == "trained"
        return self.config.lora is None or is_adapter(name) or name == VALUE_HEAD_WEIGHT

    @cached_property
    def _names_of_tower(self) -> Set[str]:
        return shapes_of_tower(hf_config(self.config.model)).keys() if self.config.model.pictures else frozenset()
