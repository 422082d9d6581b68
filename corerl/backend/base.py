"""What every backend extends: all hooks of the contract, made of a few primitives that only the backend can answer.

A subclass writes `build`, `train`, `forward`, `local_state`, `tensors` and `after_load`. From these come sharded
loading, resume, save (in the background too), the weight stream, snapshots, sleep and wake_up; each may be overridden.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from corerl.checkpoint.reader import CheckpointSource, read_extra
from corerl.checkpoint.writer import BackgroundWriter, stage, write
from corerl.config.schema import RoleConfig
from corerl.errors import CheckpointError, MemoryHeld
from corerl.memory.cache import empty_cache
from corerl.memory.communicators import Communicators
from corerl.memory.measure import GIB, DeviceMeter, Held
from corerl.memory.snapshots import Snapshots
from corerl.memory.storage import StorageSleeper, resident_bytes
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.models.config import experts, hf_config
from corerl.models.random import RandomSource
from corerl.models.readers import FirstOf, SafetensorsSource
from corerl.plugin.capabilities import Capability
from corerl.plugin.context import Context
from corerl.plugin.contract import HOOKS
from corerl.plugin.hookspecs import hookimpl
from corerl.plugin.host import BackendBase
from corerl.types import (
    ForwardResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    ParallelLayout,
    SaveResult,
    SleepResult,
    Step,
    TrainResult,
    UpdateResult,
    WakeResult,
)
from corerl.weights.chunks import Chunk, TensorSource, fill
from corerl.weights.gather import GatherPlan
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.quantize import quantize, quantized
from corerl.weights.transport import WeightSender

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Extra: TypeAlias = Mapping[str, torch.Tensor | bool | int | float | str]


class StateKey(StrEnum):
    """What `local_state` can be asked for; together the last three are a training checkpoint.

    MASTER is the most precise copy of a parameter: `param` itself where there is no other.
    """

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


SAVED = (StateKey.MASTER, StateKey.EXP_AVG, StateKey.EXP_AVG_SQ)

# What a hook needs less of a device's memory with: any, and one that passes micro-batches through the model.
LESS_MEMORY = "on more ranks that share the model, or beside engines that take less of the device"
LESS_IN_A_PASS = f"with a smaller train.tokens_per_micro_batch, with train.recompute = 'full', {LESS_MEMORY}"


class Backend(BackendBase, ABC):
    """One rank of a training backend. Every method is called on every rank, in the same order."""

    config: RoleConfig
    context: Context
    layout: ParallelLayout
    adam_step = 0  # applied optimizer steps, which Adam's bias correction counts; `train` adds those that it applies
    weights_version = 0  # of the weights that are loaded now, as far as engines know them
    phase = ""  # of `init`, while it lasts; the user is told where it takes long
    span: Callable[[str], AbstractContextManager[Any]] = staticmethod(lambda name: nullcontext())  # or a traced run's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Overriding a marked method loses pluggy's mark, and the hook would silently have no implementation.
        super().__init_subclass__(**kwargs)
        for name in vars(cls).keys() & set(HOOKS):
            hookimpl(vars(cls)[name])

    # ---- what a backend writes --------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        """Make the model and its optimizer with parameters allocated and not yet loaded. torch.distributed is ready."""

    @abstractmethod
    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        """Exactly one optimizer step at `step.lr`. Skips it, equally on all ranks, where the gradient is not finite."""

    @abstractmethod
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        """Outputs without gradients; the body stands in `with self.using(weights):`."""

    @abstractmethod
    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        """The boxes of HF tensors that this rank holds, as views to read and to write. Missing moments are created."""

    @abstractmethod
    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        """Every tensor of that kind on this rank, nothing gathered left over. Those in host memory may be among them:
        they need not sleep."""

    @abstractmethod
    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        """The chunks of `keys` were written: bring masters and working copies together, set Adam's own step where it is
        given, drop caches. {PARAM} alone is a snapshot swap: masters and moments stay as they are."""

    # ---- what a backend may add -------------------------------------------------------------------------------------

    def extra_state(self) -> Extra:
        """This rank's state that is none of the above; read again only at the same world size by the same backend."""
        return {}

    def load_extra_state(self, state: Extra) -> None:
        """Take back what `extra_state` gave."""

    def gather(self, bucket: Bucket, out: torch.Tensor | None, *, chunks: Sequence[Chunk], root: int | None) -> None:
        """Fill `out` [bucket.numel] with the bucket's full HF tensors on rank `root`, or on all where it is None.
        `out` is None on the ranks that need not hold it; `chunks` are this rank's parameters, on the device or not."""
        dtype = getattr(torch, self.manifest.dtype)
        # Buckets travel between devices, also where a rank's chunks lie in host memory.
        where = torch.empty(0, device=self.device) if out is None else out
        self._gather_plan.gather(bucket, where, chunks=chunks, root=root, dtype=dtype)

    def moments_to_come(self) -> int:
        """Bytes that moments will take on this rank's device once a step has been taken; 0 where they are there, or
        will be elsewhere. Host memory for them is made at the start; a wrong answer only makes the first sleep slow."""
        if any(tensor.ndim for tensor in self.tensors(MemoryKind.OPTIMIZER)):
            return 0
        masters = [chunk.view for chunk in self.local_state(StateKey.MASTER)]
        here = sum(view.numel() for view in masters if view.device.type == self.device.type)
        return 2 * torch.float32.itemsize * here

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks of this role."""
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None

    @property
    def device(self) -> torch.device:
        if self.config.device == "cuda":
            return torch.device("cuda", self.context.local_rank)
        return torch.device("cpu")

    def initial_weights(self) -> TensorSource:
        """Where the weights of a fresh run come from: the model's directory, or its config and the run's seed. A value
        head that the directory has not comes from the seed too."""
        hf = hf_config(self.config.model)
        shapes = {chunk.name: chunk.shape for chunk in self.local_state(StateKey.PARAM)}
        if not self.config.model.path:
            return RandomSource(hf, shapes, self.config.seed, self.device)
        files = SafetensorsSource(self.config.model.path)
        head = {name: shape for name, shape in shapes.items() if name == VALUE_HEAD_WEIGHT}
        return FirstOf(files, RandomSource(hf, head, self.config.seed, self.device)) if head else files

    # ---- hooks made of these ----------------------------------------------------------------------------------------

    @hookimpl
    def init(self, config: RoleConfig, context: Context) -> InitResult:
        self.config, self.context = config, context
        if (count := experts(hf_config(config.model))) > 1:
            self.require(Capability.MOE, f"a model of {count} experts")
        self._sleeper, self._meter = StorageSleeper(self.device), DeviceMeter(self.device)
        self._communicators = Communicators(self.device)
        self._told: set[str] = set()  # notes of earlier sleeps
        self._snapshots = Snapshots(self._sleeper.host)
        self._writer = BackgroundWriter()
        self.phase = "model build"
        self.layout = self.build(config, context)
        if config.sleeps:  # in the background: the first sleep waits for what is not ready by then
            self._sleeper.reserve(self.sleeping_bytes(), self.group)
        self.phase = "load"
        optimizer_step = self._resume(Path(config.resume)) if config.resume else self._load_initial()
        self._gather_plan = GatherPlan.build(self.local_state(StateKey.PARAM), self.group)
        if config.resume:
            self._require_all_taken(Path(config.resume))
        dtype = config.train.precision if config.weights.dtype == "model" else config.weights.dtype
        self.manifest: Manifest = build_manifest(
            self._gather_plan.shapes,
            dtype=dtype,
            bucket_bytes=config.weights.bucket_bytes,
            senders=self._gather_plan.senders,
        )
        self.phase = ""
        return InitResult(layout=self.layout, optimizer_step=optimizer_step, weights_version=self.weights_version)

    @hookimpl
    def update_weights(self, sender: WeightSender, version: int) -> UpdateResult:
        started = time.perf_counter()
        roots = [sender.sender_of(bucket) for bucket in self.manifest.buckets]
        sends = None in roots or self.layout.rank in roots
        sent, stream = 0, self.stream
        chunks = self.local_state(StateKey.PARAM)  # while the engines are on their way
        if sends:
            with self.span("meet engines"):
                sender.begin(stream, version)
        for bucket, root in zip(self.manifest.buckets, roots, strict=True):
            sent += self._send(sender, bucket, stream, chunks=chunks, root=root)
        self._gather_plan.release()
        engines: Mapping[str, str] = {}
        if sends:
            with self.span("wait for engines"):
                engines = sender.commit()
            sent = sent if sender.sent is None else sender.sent
        self.weights_version = version
        return UpdateResult(version=version, bytes=sent, seconds=time.perf_counter() - started, engines=engines)

    @hookimpl
    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        self._writer.wait()  # one save in flight; an earlier one's failure surfaces here
        extra = {
            "optimizer_step": step.optimizer_step,
            "adam_step": self.adam_step,
            "weights_version": self.weights_version,
            "backend": type(self).__qualname__,
            "world_size": self.layout.world_size,
            **{f"rank/{name}": value for name, value in self.extra_state().items()},
        }
        staged = stage({key.value: self.local_state(key) for key in SAVED}, extra)
        if background:
            self._writer.submit(lambda: write(staged, Path(path), self.layout.rank))
        else:
            write(staged, Path(path), self.layout.rank)
        return SaveResult(path=path, bytes=staged.bytes, complete=not background)

    @hookimpl
    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        before = self._meter.held(self._all_tensors())
        freed = sum(self._sleeper.release(kind, self.on_device(kind)) for kind in sorted(kinds))
        empty_cache(self.device)
        kept = ""
        if self.config.suspend_communicators and self._sleeper.asleep == set(MemoryKind):
            kept = self._communicators.suspend()
        held = self._meter.held(self._all_tensors())
        self._require_little(held)
        notes = {self._sleeper.refusal, kept} - {"", *self._told}
        self._told |= notes
        return SleepResult(
            freed_bytes=freed,
            residual_bytes=held.residual,
            driver_freed_bytes=before.residual - held.residual,
            used_bytes=before.used,
            notes=tuple(notes),
        )

    @hookimpl
    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        self._communicators.resume()
        return WakeResult(restored_bytes=sum(self._sleeper.restore(kind) for kind in sorted(kinds)))

    @hookimpl
    def shutdown(self, reason: str) -> None:
        try:
            self._writer.close()
        finally:
            self._sleeper.close()

    # ---- what the worker asks of a backend besides its hooks --------------------------------------------------------

    @property
    def stream(self) -> Manifest:
        """What engines are sent: the manifest of what is gathered, or its quantised form."""
        weights = self.config.weights
        return quantized(self.manifest, weights.unquantized) if weights.quantize == "fp8" else self.manifest

    def saved(self, wait: bool) -> bool:
        """Whether the last background save is written; waits for it where asked. Raises SaveFailed where it failed."""
        if wait:
            self._writer.wait()
        return self._writer.idle()

    def create_snapshot(self, name: str) -> None:
        """Keep the current weights under `name` in host memory; an earlier one of that name is replaced."""
        self._snapshots.create(name, self.local_state(StateKey.PARAM))

    def load_snapshot(self, name: str, path: str) -> None:
        """Keep the weights of a model directory under `name`; an empty path means those that the run started from."""
        source = SafetensorsSource(path) if path else self.initial_weights()
        self._snapshots.load(name, self.local_state(StateKey.PARAM), source)

    def drop_snapshot(self, name: str) -> None:
        self._snapshots.drop(name)

    @contextlib.contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """The snapshot `weights` stands in the model's place; "" changes nothing."""
        if not weights:
            yield
            return
        try:
            with self._snapshots.swapped(weights, self.local_state(StateKey.PARAM)):
                self.after_load({StateKey.PARAM}, None)
                yield
        finally:
            self.after_load({StateKey.PARAM}, None)

    def _send(
        self, sender: WeightSender, bucket: Bucket, stream: Manifest, *, chunks: Sequence[Chunk], root: int | None
    ) -> int:
        """Gather a bucket on every rank, and send it, in the form of `stream`, where `root` is this rank or None; bytes
        sent. Nothing is left that holds the sender's memory."""
        holds, direct = root in (None, self.layout.rank), stream is self.manifest
        out: torch.Tensor | None = None
        if holds:
            out = self._room(sender, bucket, self.manifest) if direct else self._memory(bucket, self.manifest)
        with self.span("gather"):
            self.gather(bucket, out, chunks=chunks, root=root)
        if out is None:
            return 0
        as_sent = stream.buckets[bucket.index]
        if not direct:
            flat, out = out, self._room(sender, as_sent, stream)
            with self.span("quantise"):
                quantize(bucket, flat, as_sent, out)
        with self.span("send"):
            sender.send(as_sent, out)
        return out.numel() * out.element_size()

    def _room(self, sender: WeightSender, bucket: Bucket, manifest: Manifest) -> torch.Tensor:
        """Where to write a bucket of `manifest`, [bucket.numel]: the sender's memory, or this rank's."""
        with self.span("wait for room"):
            room = sender.room(bucket.numel, getattr(torch, manifest.dtype))
        return self._memory(bucket, manifest) if room is None else room

    def _memory(self, bucket: Bucket, manifest: Manifest) -> torch.Tensor:
        """Of this rank, [bucket.numel], for all buckets of `manifest`: new memory costs more than writing to it."""
        use, dtype = f"bucket of {manifest.dtype}", getattr(torch, manifest.dtype)
        return self._gather_plan.memory(use, manifest.largest, dtype, self.device)[: bucket.numel]

    def on_device(self, kind: MemoryKind) -> list[torch.Tensor]:
        """Of `tensors(kind)` those that take memory on the role's device."""
        return [tensor for tensor in self.tensors(kind) if tensor.device.type == self.device.type]

    def sleeping_bytes(self) -> int:
        """Host memory that this rank takes when all of it sleeps, after its first step."""
        copied = (tensor for kind in MemoryKind if kind is not MemoryKind.GRAD for tensor in self.on_device(kind))
        return resident_bytes(copied) + self.moments_to_come()

    def explained(self, hook: str, error: BaseException) -> str:
        """Of a device that has no memory left: what holds it, and what needs less."""
        if not isinstance(error, torch.OutOfMemoryError):
            return ""
        try:
            held = self._meter.held(self._all_tensors())  # before a backend gives back what it had gathered
            parts = held.described({kind: resident_bytes(self.on_device(kind)) for kind in MemoryKind})
        except Exception:  # half built, or stopped in the middle of a step: then the error speaks for itself
            return ""
        if others := held.used - held.residual:
            parts += f"; other processes: {others / GIB:.3g} GiB"
        asked, free, _ = str(error).partition(" is free")  # behind it torch counts in its own words
        less = LESS_IN_A_PASS if hook in ("train", "forward") else LESS_MEMORY
        return f"{type(error).__name__}: {asked}{free}; held are {parts}; less is needed {less}"

    def _require_little(self, held: Held) -> None:
        """Raises MemoryHeld where all kinds sleep and more than the config allows is still held."""
        allowed = self.config.max_residual_gib
        if not allowed or held.residual <= allowed * GIB or self._sleeper.asleep != set(MemoryKind):
            return
        parts = held.described({kind: resident_bytes(self.on_device(kind)) for kind in MemoryKind})
        raise MemoryHeld(
            f"{held.residual / GIB:.3g} GiB of {self.device} are held while everything sleeps, more than "
            f"cluster.max_residual_gib = {allowed:g}: {parts}; allow more, or free what is there"
        )

    def _all_tensors(self) -> Iterator[torch.Tensor]:
        for kind in MemoryKind:
            yield from self.on_device(kind)

    def _load_initial(self) -> int:
        what = f"model directory {self.config.model.path}" if self.config.model.path else "random initialisation"
        fill(self.local_state(StateKey.MASTER), self.initial_weights(), what=what)
        self.after_load({StateKey.MASTER}, None)
        return 0

    def _require_all_taken(self, directory: Path) -> None:
        """A checkpoint of a larger model has all that a smaller one asks for; look for what no rank has asked for."""
        taken = {name for name, _ in self._gather_plan.shapes}
        for name, shape in CheckpointSource(directory, StateKey.MASTER.value).shapes.items():
            if name not in taken:
                raise CheckpointError(
                    f"checkpoint {directory} holds {name!r} {list(shape)}, which the model does not have: they belong "
                    "to different models; resume with the model that the checkpoint was written with"
                )

    def _resume(self, directory: Path) -> int:
        extra = read_extra(directory, 0)
        saved, own = extra["world_size"], self.layout.world_size
        if saved != own:
            self.require(Capability.RESHARD, f"resuming on {own} ranks what {saved} saved")
        self.adam_step = int(extra["adam_step"])
        for key in SAVED:
            fill(self.local_state(key), CheckpointSource(directory, key.value), what=f"checkpoint {directory}")
        self.after_load(set(SAVED), self.adam_step)
        self.weights_version = int(extra["weights_version"])
        if (extra["backend"], saved) == (type(self).__qualname__, own):
            of_rank = read_extra(directory, self.layout.rank)
            self.load_extra_state(
                {name.removeprefix("rank/"): value for name, value in of_rank.items() if name.startswith("rank/")}
            )
        return int(extra["optimizer_step"])
