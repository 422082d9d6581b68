"""Load, save and resume a rank's training state, box by box."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corerl.backend.frozen_weights import digest, require_same
from corerl.backend.primitives import SAVED, Primitives, StateKey
from corerl.checkpoint.format import BUFFER
from corerl.checkpoint.reader import SavedState
from corerl.checkpoint.writer import BackgroundWriter, in_memory, stage, write
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.plugin.capabilities import Capability
from corerl.plugin.spec import hookimpl
from corerl.types import SaveResult, Step
from corerl.weights.adapters import is_adapter
from corerl.weights.chunks import Chunk, fill


class TrainingState(Primitives):
    """The hook `save`, and what `init` loads."""

    def _open_state(self) -> None:
        self._writer, self._memory_writer = BackgroundWriter(), BackgroundWriter()

    @hookimpl
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        # One save in flight to disk and one to memory; an earlier save's failure surfaces here.
        writer = self._memory_writer if in_memory(path) else self._writer
        writer.wait()
        staged = stage({BUFFER: self.buffers(), **self._trained_state()}, self._extra(step))
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
        chunks = [*self.local_state(key), *self.buffers()]
        fill(chunks, self.initial_weights(chunks), what=what)
        self.after_load({key} | base, None)
        return 0

    def _load_frozen(self, what: str) -> set[StateKey]:
        """Load the weights that adapters leave as they are; returns the key of what was loaded, if any."""
        if self.config.lora is None:
            return set()
        chunks = [chunk for chunk in self.local_state(StateKey.PARAM) if not is_trained(chunk.name)]
        fill(chunks, self.initial_weights(chunks), what=what)
        self._frozen_digest = digest(chunks, self.group)
        return {StateKey.PARAM}

    def _saved(self) -> SavedState | None:
        """What this rank goes on from; None if it begins with the model's own weights."""
        if self.config.resume:
            return SavedState(self.config.resume, rank=self.layout.rank, ranks=self.layout.world_size)
        return None

    def _trained_state(self) -> dict[str, Sequence[Chunk]]:
        return {key.value: self.local_state(key) for key in SAVED}

    def _extra(self, step: Step) -> dict[str, Any]:
        """What whoever goes on with this rank's state needs besides tensors; `step` is the one that comes next."""
        lora = self.config.lora
        return {
            "optimizer_step": step.optimizer_step,
            "adam_step": self.adam_step,
            "weights_version": self.weights_version,
            "backend": type(self).__qualname__,
            "world_size": self.layout.world_size,
            **({"frozen_weights": self._frozen_digest, "lora_scale": lora.scale} if lora is not None else {}),
            **{f"rank/{name}": value for name, value in self.extra_state().items()},
        }

    def _resume(self, saved: SavedState) -> int:
        extra = saved.extra(0)
        ranks, own = extra["world_size"], self.layout.world_size
        if ranks != own:
            self.require(
                Capability.RESHARD,
                f"going on from the state of {ranks} ranks with roles.{self.context.role}.ranks = {own}",
            )
        base = self._load_frozen(self._begins_with)
        if base:
            assert self.config.lora is not None
            require_same(extra, self._frozen_digest, self.config.lora.scale, where=str(saved))
        self.adam_step = int(extra["adam_step"])
        for key in SAVED:
            saved.take(key.value, [*self.local_state(key), *(self.buffers() if key is StateKey.MASTER else ())])
        self.after_load({*SAVED, *base}, self.adam_step)
        self.weights_version = int(extra["weights_version"])
        if (extra["backend"], ranks) == (type(self).__qualname__, own):
            of_rank = saved.extra(self.layout.rank)
            self.load_extra_state(
                {name.removeprefix("rank/"): value for name, value in of_rank.items() if name.startswith("rank/")}
            )
        return int(extra["optimizer_step"])


def is_trained(name: str) -> bool:
    """Whether a role with adapters trains the HF tensor of that name."""
    return is_adapter(name) or name == VALUE_HEAD_WEIGHT
