"""Load, save and resume a rank's training state, box by box."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from corerl.backend.primitives import SAVED, Primitives, StateKey
from corerl.checkpoint.format import BUFFER, WEIGHTS
from corerl.checkpoint.reader import CheckpointSource, read_extra
from corerl.checkpoint.writer import BackgroundWriter, in_memory, stage, write
from corerl.errors import CheckpointError
from corerl.plugin.capabilities import Capability
from corerl.types import SaveResult, Step
from corerl.weights.checksums import bit_sums
from corerl.weights.chunks import Chunk, fill
from corerl.weights.gather import all_gather_json


class TrainingState(Primitives):
    """The hook `save`, and what `init` loads."""

    def _open_state(self) -> None:
        self._writer, self._memory_writer = BackgroundWriter(), BackgroundWriter()

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        # One save in flight to disk and one to memory; an earlier save's failure surfaces here.
        writer = self._memory_writer if in_memory(path) else self._writer
        writer.wait()
        trained = {key.value: self.held_state(key) for key in SAVED}
        staged = stage({BUFFER: self.buffers(), **trained}, self._extra(step))
        if background:
            writer.submit(lambda: write(staged, Path(path), self.layout.rank))
        else:
            write(staged, Path(path), self.layout.rank)
        return SaveResult(path=path, bytes=staged.bytes, complete=not background)

    def saved(self, wait: bool, *, memory: bool = False) -> bool:
        """Whether the last background save to disk, or to `memory`, is written; `wait` blocks until it is. Raises
        SaveFailed if it failed."""
        writer = self._memory_writer if memory else self._writer
        if wait:
            writer.wait()
        return writer.idle()

    @property
    def _begins_with(self) -> str:
        """Where the initial weights come from, for messages."""
        lora, path = self.config.lora, self.config.model.path
        weights = f"model.path={path!r}" if path else "random initialization"
        return f"{weights} or lora.path={lora.path!r}" if lora is not None and lora.path else weights

    def _load_initial(self) -> int:
        what = self._begins_with
        key = StateKey.PARAM if self.config.frozen else StateKey.MASTER
        base = self._load_frozen(what)
        chunks = [*self.held_state(key), *self.buffers()]
        fill(chunks, self.initial_weights(chunks), what=what)
        self.after_load({key} | base, None)
        return 0

    def _load_frozen(self, what: str) -> set[StateKey]:
        """Load the weights that training leaves as they are: those that adapters are added to, and a frozen tower.
        Returns the key of what was loaded, if any."""
        if self.config.frozen or (self.config.lora is None and not self._names_of_tower):
            return set()
        chunks = [chunk for chunk in self.held_state(StateKey.PARAM) if not self.trains(chunk.name)]
        if chunks:
            fill(chunks, self.initial_weights(chunks), what=what)
        if self.config.lora is not None:
            base = [chunk for chunk in chunks if chunk.name not in self._names_of_tower]
            self._frozen_digest = digest_of_frozen(base, self.group)
        return {StateKey.PARAM}

    def _extra(self, step: Step) -> dict[str, Any]:
        """What whoever goes on with this rank's state needs besides tensors; `step` is the one that comes next."""
        lora = self.config.lora
        return {
            "optimizer_step": step.optimizer_step,
            "adam_step": self.adam_step,
            **({} if self.tower is None else {"tower_adam_step": self.tower.adam_step}),
            "weights_version": self.weights_version,
            "backend": type(self).__qualname__,
            "world_size": self.layout.world_size,
            **({"frozen_weights": self._frozen_digest, "lora_scale": lora.scale} if lora is not None else {}),
            **{f"rank/{name}": value for name, value in self.extra_state().items()},
        }

    def _resume(self) -> int:
        extra = read_extra(self.config.resume, 0)
        ranks, own = extra["world_size"], self.layout.world_size
        if ranks != own:
            self.require(
                Capability.RESHARD,
                f"going on from the state of {ranks} ranks with roles.{self.context.role}.ranks = {own}",
            )
        base = self._load_frozen(self._begins_with)
        if self.config.lora is not None:
            require_same(extra, self._frozen_digest, self.config.lora.scale, where=self._checkpoint)
        self.weights_version = int(extra["weights_version"])
        weights = [*self.held_state(StateKey.MASTER), *self.buffers()]
        if not self.config.resume_moments:
            self._take(StateKey.MASTER, weights)
            self.after_load({StateKey.MASTER, *base}, None)
            return 0
        self.adam_step = int(extra["adam_step"])
        if self.tower is not None:  # a backend without `tower` keeps one count for all
            self.tower.adam_step = int(extra.get("tower_adam_step", self.adam_step))
        for key in SAVED:
            self._take(key, weights if key is StateKey.MASTER else self.held_state(key))
        self.after_load({*SAVED, *base}, self.adam_step)
        if extra["backend"] == type(self).__qualname__:
            of_rank = read_extra(self.config.resume, self.layout.rank if ranks == own else 0)
            self.load_extra_state(
                {name.removeprefix("rank/"): value for name, value in of_rank.items() if name.startswith("rank/")}
            )
        return int(extra["optimizer_step"])

    @property
    def _checkpoint(self) -> str:
        """What this rank goes on from, for messages."""
        return f"checkpoint {Path(self.config.resume)}"

    def _take(self, key: StateKey, chunks: Sequence[Chunk]) -> None:
        """Fill the chunks with the saved state, for MASTER that of buffers too, and verify this rank's part of all of
        it."""
        source = CheckpointSource(self.config.resume, *(WEIGHTS if key is StateKey.MASTER else [key.value]))
        fill(chunks, source, what=self._checkpoint)
        source.verify(rank=self.layout.rank, world_size=self.layout.world_size)

    def _require_no_other_tensors(self, names: Collection[str]) -> None:
        """Raise CheckpointError if the checkpoint holds other weights than these: it is of a larger model."""
        for name, shape in CheckpointSource(self.config.resume, *WEIGHTS).shapes.items():
            if name not in names:
                raise CheckpointError(
                    f"{self._checkpoint} contains {name!r} {list(shape)}, which this model does not have; resume "
                    "with the model that the checkpoint was written with"
                )


def digest_of_frozen(chunks: Sequence[Chunk], group: ProcessGroup | None) -> str:
    """What identifies the weights that a role with adapters does not train, and its checkpoints lack: of all ranks,
    however they are split, in float32 or bfloat16; float16, which has fewer exponents, may round small ones to others.
    For each tensor, the bits of its values in bfloat16 are summed, in any order. Called on every rank."""
    own: dict[str, int] = {}
    for chunk in chunks:
        if not chunk.replica:
            own[chunk.name] = own.get(chunk.name, 0) + rounded_sum(chunk.view)
    ranks = [own] if group is None else all_gather_json(own, group)
    names = {name for sums in ranks for name in sums}
    return of_sums({name: sum(sums.get(name, 0) for sums in ranks) for name in names})


def rounded_sum(values: torch.Tensor) -> int:
    """The sum of the bits of `values` in bfloat16."""
    return bit_sums({"": values.to(torch.bfloat16)})[""]


def of_sums(sums: Mapping[str, int]) -> str:
    """The digest of whole tensors by name -> `rounded_sum`."""
    lines = [f"{name} {sums[name] % 2**64:x}" for name in sorted(sums)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def require_same(extra: Mapping[str, Any], own: str, scale: float, *, where: str) -> None:
    """Raise CheckpointError if adapters were trained with weights of another digest, or with another scale."""
    if (digest := extra.get("frozen_weights")) != own:
        raise CheckpointError(
            f"{where}: its adapters belong to other weights (digest {digest or 'none'}) than this model's ({own}); "
            "resume with the model.path, or the run.seed of random weights, that they were trained with, and in "
            "float16 if that was their train.precision"
        )
    if (before := extra.get("lora_scale")) != scale:
        raise CheckpointError(
            f"{where}: its adapters were trained with a scale of {before} (alpha / rank, or with rslora alpha / root "
            f"of rank), this run's is {scale}; resume with the lora.alpha and lora.rslora that they were trained with"
        )
