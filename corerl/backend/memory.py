"""Put a rank's device memory to sleep and wake it up, and keep snapshots of its weights in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence, Set

import torch

from corerl.backend.primitives import Primitives, StateKey
from corerl.memory.device import GIB, empty_cache, held_on
from corerl.memory.storage import HostWeights, StorageSleeper, resident_bytes
from corerl.models.config import hf_config
from corerl.models.files import model_files
from corerl.types import MemoryKind, SleepResult, WakeResult
from corerl.weights.chunks import Chunk

# How to use less device memory: in any hook, and in one that passes micro-batches through the model.
LESS_MEMORY = "split the model over more ranks, or give the engines less of the device"
LESS_IN_A_PASS = f"lower train.tokens_per_micro_batch, set train.recompute = 'full', {LESS_MEMORY}"


class DeviceMemory(Primitives):
    """The hooks `sleep` and `wake_up`, snapshots, and why memory ran out."""

    def _open_memory(self) -> None:
        self._sleeper = StorageSleeper(self.device)
        self._told: set[str] = set()  # notes that earlier sleeps returned
        self._host_weights = HostWeights(self._sleeper.host)

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        before = held_on(self.device, self._all_tensors())
        freed = sum(self._sleeper.release(kind, self.on_device(kind)) for kind in sorted(kinds))
        empty_cache(self.device)
        held = held_on(self.device, self._all_tensors())
        notes = {self._sleeper.host.refusal} - {"", *self._told}
        self._told |= notes
        return SleepResult(
            freed_bytes=freed,
            residual_bytes=held.residual,
            driver_freed_bytes=before.residual - held.residual,
            used_bytes=before.used,
            total_bytes=before.total,
            notes=tuple(notes),
        )

    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        return WakeResult(restored_bytes=sum(self._sleeper.restore(kind) for kind in sorted(kinds)))

    def moments_to_come(self) -> int:
        """Bytes that moments will take on this rank's device after the first step; 0 if they already exist or live
        elsewhere. Host memory for them is reserved early; a wrong answer only makes the first sleep slow."""
        if any(tensor.ndim for tensor in self.tensors(MemoryKind.OPTIMIZER)):
            return 0
        masters = [chunk.view for chunk in self.held_state(StateKey.MASTER)]
        here = sum(view.numel() for view in masters if view.device.type == self.device.type)
        return 2 * torch.float32.itemsize * here

    @property
    def changing(self) -> Sequence[Chunk]:
        """Those of the weights that training changes: what a snapshot holds. So with adapters it is small, and a
        reference policy takes no second copy of the model."""
        return [each for each in self.weights if self.trains(each.name)]

    def create_snapshot(self, name: str) -> None:
        """Keep the current weights in host memory as snapshot `name`, replacing any earlier one."""
        self._host_weights.save(name, self.changing)

    def load_snapshot(self, name: str, path: str) -> None:
        """Keep a model directory's weights as snapshot `name`; an empty path means the run's initial weights."""
        source = model_files(path, hf_config(self.config.model)) if path else self.initial_weights(self.changing)
        self._host_weights.load(name, self.changing, source)

    def drop_snapshot(self, name: str) -> None:
        self._host_weights.drop(name)

    @contextlib.contextmanager
    def using(self, snapshot: str) -> Iterator[None]:
        """Run the block with `snapshot` swapped in for the model's weights; "" changes nothing."""
        if not snapshot:
            yield
            return
        try:
            with self._host_weights.swapped(snapshot, self.changing):
                self.after_load({StateKey.PARAM}, None)
                yield
        finally:
            self.after_load({StateKey.PARAM}, None)

    def on_device(self, kind: MemoryKind) -> list[torch.Tensor]:
        """The `tensors(kind)` that take memory on the role's device. A frozen role has parameters alone."""
        if self.config.frozen and kind is not MemoryKind.PARAM:
            return []
        of_tower = [] if self.tower is None else self.tower.tensors(kind)
        return [tensor for tensor in (*self.tensors(kind), *of_tower) if tensor.device.type == self.device.type]

    def sleeping_bytes(self, kinds: Iterable[MemoryKind] = tuple(MemoryKind)) -> int:
        """Bytes of host memory that this rank takes when these kinds sleep, after its first step."""
        copied = frozenset(kinds) - {MemoryKind.GRAD}
        held = resident_bytes(tensor for kind in copied for tensor in self.on_device(kind))
        grows = MemoryKind.OPTIMIZER in copied and not self.config.frozen
        return held + (self.moments_to_come() if grows else 0)

    def explained(self, hook: str, error: BaseException) -> str:
        """For an out-of-memory error: what holds the device's memory, and what would need less."""
        if not isinstance(error, torch.OutOfMemoryError):
            return ""
        try:
            held = held_on(self.device, self._all_tensors())  # measured before a backend releases gathered parameters
            parts = held.described({kind: resident_bytes(self.on_device(kind)) for kind in MemoryKind})
        except Exception:  # half built, or stopped in mid-step: the error speaks for itself
            return ""
        if others := held.used - held.residual:
            parts += f"; other processes: {others / GIB:.3g} GiB"
        asked, free, _ = str(error).partition(" is free")  # after that come torch's own numbers
        less = LESS_IN_A_PASS if hook in ("forward_backward", "forward") else LESS_MEMORY
        return f"{type(error).__name__}: {asked}{free}; in use: {parts}; to need less, {less}"

    def _all_tensors(self) -> Iterator[torch.Tensor]:
        for kind in MemoryKind:
            yield from self.on_device(kind)
