"""The base class of every backend: all hooks of the contract, built on a few primitives that only the backend has.

A subclass writes `build`, `forward_backward`, `optimizer_step`, `forward`, `local_state`, `tensors` and `after_load`.
From these come sharded loading, resume, save (also in the background), the weight stream, snapshots, sleep and wake_up;
each may be overridden.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import evolve

from corerl.backend.frozen_weights import digest, require_same
from corerl.checkpoint.copies import StateCopies
from corerl.checkpoint.format import BUFFER, require_fields
from corerl.checkpoint.reader import SavedState
from corerl.checkpoint.writer import BackgroundWriter, stage, write
from corerl.config.schema import RoleConfig
from corerl.errors import ContractError, MemoryHeld, Unsupported
from corerl.memory.cache import empty_cache
from corerl.memory.communicators import Communicators
from corerl.memory.measure import GIB, DeviceMeter, Held
from corerl.memory.snapshots import Snapshots
from corerl.memory.storage import StorageSleeper, resident_bytes
from corerl.models.build import VALUE_HEAD_WEIGHT, stored_buffers
from corerl.models.config import experts, hf_config
from corerl.models.files import initial_source, look_at, model_files
from corerl.plugin.capabilities import Capability
from corerl.plugin.contract import HOOKS
from corerl.plugin.hookspecs import Context
from corerl.plugin.host import BackendBase
from corerl.plugin.spec import hookimpl
from corerl.types import (
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    ParallelLayout,
    SaveResult,
    SleepResult,
    Step,
    StepResult,
    UpdateResult,
    WakeResult,
)
from corerl.weights.adapters import Adapters, is_adapter
from corerl.weights.chunks import Chunk, TensorSource, fill
from corerl.weights.gather import GatherPlan
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.quantize import quantize, quantized
from corerl.weights.transport import WeightSender

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
SNAPSHOT = "snapshot/"  # before the name of one, as a key of what is written

# How to use less device memory: in any hook, and in one that passes micro-batches through the model.
LESS_MEMORY = "split the model over more ranks, or give the engines less of the device"
LESS_IN_A_PASS = f"lower train.tokens_per_micro_batch, set train.recompute = 'full', {LESS_MEMORY}"


class Backend(BackendBase, ABC):
    """One rank of a training backend. Every method is called on every rank, in the same order."""

    config: RoleConfig
    context: Context
    layout: ParallelLayout
    adam_step = 0  # applied steps, for Adam's bias correction; `optimizer_step` adds 1 for each that it applies
    weights_version = 0  # the version that engines were last sent
    phase = ""  # of `init`, while it runs; shown to the user if it takes long
    span: Callable[[str], AbstractContextManager[Any]] = staticmethod(lambda name: nullcontext())  # set in a traced run

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # An overriding method lacks pluggy's mark, so the hook would silently have no implementation.
        super().__init_subclass__(**kwargs)
        for name in vars(cls).keys() & set(HOOKS):
            hookimpl(vars(cls)[name])

    # ---- what a backend must implement ------------------------------------------------------------------------------

    @abstractmethod
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        """Build the model and its optimizer, with parameters allocated but not loaded. torch.distributed is ready.

        A role with adapters (`config.lora`) trains these and a value head; its other weights are in the precision of
        its passes, without masters, gradients and moments. A frozen role (`config.frozen`) has no optimizer, masters or
        gradients, and its weights are in the precision of its passes. Of the other methods only `forward`,
        `local_state` and `tensors` for parameters, `after_load` for parameters, `buffers` and `gather` are called then.
        """

    @abstractmethod
    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        """Add the gradients of the micro-batches, of which there is at least one, to those that are there already.
        Masters and moments stay as they are: copies of them may still be under way (checkpoint.memory).
        Return `outputs` of the same passes, from output ranks. `last` is a hint: no other call comes before
        `optimizer_step`, which may also come without it. Between two calls there may be a `forward`, an
        `update_weights`, and a sleep of all kinds but gradients."""

    @abstractmethod
    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        """Multiply the gradients by `scale`, clip them, and take exactly one optimizer step at `step.lr`; skip it on
        all ranks alike if the gradient is not finite. No gradient is left then."""

    @abstractmethod
    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        """Compute outputs without gradients, inside `with self.using(weights):`."""

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
        """This rank's other state; restored only by the same backend at the same world size."""
        return {}

    def load_extra_state(self, state: ExtraState) -> None:
        """Restore what `extra_state` returned."""

    def gather(self, bucket: Bucket, out: torch.Tensor | None, *, chunks: Sequence[Chunk], root: int | None) -> None:
        """Fill `out` [bucket.numel] with the bucket's full HF tensors on rank `root`, or on all ranks if it is None.
        `out` is None on ranks that do not need it; `chunks` are this rank's parameters, on the device or not."""
        dtype = getattr(torch, self.manifest.dtype)
        # Buckets travel between devices, even if a rank's chunks are in host memory.
        where = torch.empty(0, device=self.device) if out is None else out
        self._gather_plan.gather(bucket, where, chunks=chunks, root=root, dtype=dtype)

    def moments_to_come(self) -> int:
        """Bytes that moments will take on this rank's device after the first step; 0 if they already exist or live
        elsewhere. Host memory for them is reserved early; a wrong answer only makes the first sleep slow."""
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

    def initial_weights(self, chunks: Sequence[Chunk]) -> TensorSource:
        """The source of a fresh run's weights for these chunks."""
        shapes = {chunk.name: chunk.shape for chunk in chunks}
        hf, lora = hf_config(self.config.model), self.config.lora
        return initial_source(self.config.model, hf, shapes, seed=self.config.seed, device=self.device, lora=lora)

    # ---- hooks built on these ---------------------------------------------------------------------------------------

    @hookimpl
    def init(self, config: RoleConfig, context: Context) -> InitResult:
        # The driver settles what [train] leaves open; so does whoever makes a role's config without it.
        config = evolve(config, train=config.train.settled(config.device))
        self.config, self.context = config, context
        self._sleeper, self._meter = StorageSleeper(self.device), DeviceMeter(self.device)
        self._communicators = Communicators(self.device)
        self._told: set[str] = set()  # notes that earlier sleeps returned
        self._snapshots = Snapshots(self._sleeper.host)
        self._copies = StateCopies(self.device)
        self._writer = BackgroundWriter()
        if (count := experts(hf_config(config.model))) > 1:
            self.require(Capability.MOE, f"a model with {count} experts")
        if Capability.BUFFERS in self.declared:  # else the model need not be looked at
            for name in stored_buffers(look_at(hf_config(config.model))):
                self.require(Capability.BUFFERS, f"a model with weights in buffers ({name})")
        self.phase = "model build"
        self.layout = self.build(config, context)
        if not isinstance(self.layout, ParallelLayout):
            raise ContractError(
                f"backend:{self.label or type(self).__name__} returned {type(self.layout).__name__} from build(), "
                "expected ParallelLayout; return this rank's layout"
            )
        if config.sleeps:  # in the background; the first sleep waits for whatever is not ready by then
            self._sleeper.reserve(self.sleeping_bytes(map(MemoryKind, config.sleeps)), self.group)
        self.phase = "load"
        saved = self._saved()
        optimizer_step = self._load_initial() if saved is None else self._resume(saved)
        self._gather_plan = GatherPlan.build(self.weights, self.group)
        if saved is not None:
            saved.require_taken({name for name, _ in self._gather_plan.shapes})
        dtype = config.train.precision if config.weights.dtype == "model" else config.weights.dtype
        cut = functools.partial(
            build_manifest, dtype=dtype, bucket_bytes=config.weights.bucket_bytes, senders=self._gather_plan.senders
        )
        adapters = [each for each in self._gather_plan.shapes if is_adapter(each[0])]
        apart = config.weights.lora == "adapter"
        self._alone = cut(adapters) if adapters and apart else None
        # One bucket: they are small, and whoever merges a weight needs both of its adapter's matrices.
        merged = build_manifest(adapters, dtype="float32", bucket_bytes=sys.maxsize) if adapters and not apart else None
        self._merged = () if merged is None else merged.buckets
        self.manifest: Manifest = cut([each for each in self._gather_plan.shapes if apart or not is_adapter(each[0])])
        self.phase = ""
        return InitResult(layout=self.layout, optimizer_step=optimizer_step, weights_version=self.weights_version)

    @hookimpl
    def update_weights(self, sender: WeightSender, version: int, adapters: bool) -> UpdateResult:
        started = time.perf_counter()
        gathered, stream = self._manifest_of(adapters=adapters), self.stream_of(adapters=adapters)
        roots = [sender.sender_of(bucket) for bucket in gathered.buckets]
        sends = None in roots or self.layout.rank in roots
        sent = 0
        chunks = self.weights  # before meeting the engines, which get ready meanwhile
        try:
            merged = self._gather_adapters(chunks, root=roots[0] if len(set(roots)) == 1 else None)
            if sends:
                with self.span("meet engines"):
                    sender.begin(stream, version)
            for bucket, root in zip(gathered.buckets, roots, strict=True):
                sent += self._send(sender, bucket, gathered, stream, chunks=chunks, root=root, merged=merged)
        finally:
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
        self._writer.wait()  # one save in flight; an earlier save's failure surfaces here
        staged = stage({BUFFER: self.buffers(), **self._trained_state()}, self._extra(step))
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
            total_bytes=before.total,
            notes=tuple(notes),
        )

    @hookimpl
    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        self._communicators.resume()
        return WakeResult(restored_bytes=sum(self._sleeper.restore(kind) for kind in sorted(kinds)))

    @hookimpl
    def shutdown(self, reason: str) -> None:
        with contextlib.ExitStack() as closing:  # each that `build` has come to, whatever the others raise
            for name in ("_sleeper", "_copies", "_writer"):
                if (held := getattr(self, name, None)) is not None:
                    closing.callback(held.close)

    # ---- what the worker calls besides the hooks --------------------------------------------------------------------

    @property
    def weights(self) -> Sequence[Chunk]:
        """All weights of this rank, adapters included: what engines are sent, the latter merged into the former."""
        return [*self.local_state(StateKey.PARAM), *self.buffers()]

    @property
    def changing(self) -> Sequence[Chunk]:
        """Those of the weights that training changes: what a snapshot holds. So with adapters it is small, and a
        reference policy takes no second copy of the model."""
        return self.weights if self.config.lora is None else [each for each in self.weights if _is_trained(each.name)]

    def stream_of(self, *, adapters: bool) -> Manifest:
        """The manifest of what engines are sent: that of the gathered weights, or one in which tensors are quantized,
        and buffers more precise than the manifest's dtype stay so. With `adapters`, of these alone; raises Unsupported
        if they are merged, or there are none."""
        weights, gathered = self.config.weights, self._manifest_of(adapters=adapters)
        left_out = weights.unquantized if weights.quantize == "fp8" else None
        precise = {name: str(view.dtype).removeprefix("torch.") for name, view in self._precise().items()}
        if adapters or (left_out is None and not precise):
            return gathered
        return quantized(gathered, left_out, precise=precise)

    def _manifest_of(self, *, adapters: bool) -> Manifest:
        if not adapters:
            return self.manifest
        if self._alone is None:
            raise Unsupported(
                f"the {self.context.role} sends no adapters apart from its weights; set [lora] and "
                "weights.lora='adapter', or send all weights"
            )
        return self._alone

    def _precise(self) -> dict[str, torch.Tensor]:
        """The buffers that the manifest's dtype would round: such as decide which experts a token goes to."""
        sent = getattr(torch, self.manifest.dtype)
        return {
            chunk.name: chunk.view for chunk in self.buffers() if torch.promote_types(chunk.view.dtype, sent) != sent
        }

    def saved(self, wait: bool) -> bool:
        """Whether the last background save is written; `wait` blocks until it is. Raises SaveFailed if it failed."""
        if wait:
            self._writer.wait()
        return self._writer.idle()

    def copy(self, path: str, step: Step) -> SaveResult:
        """Begin to copy what `save` writes into files in memory, and return once it is copied but for what is on a GPU.
        That is read beside the next passes, until `settle`. Raises SaveFailed, also if the copy before failed."""
        # A pass changes no master and no moment, but buffers it may.
        buffers = [evolve(chunk, view=chunk.view.clone()) for chunk in self.buffers() if not chunk.replica]
        state = {BUFFER: buffers, **self._trained_state()}
        copied = self._copies.begin(Path(path), self.layout.rank, state, self._extra(step))
        return SaveResult(path=path, bytes=copied, complete=False)

    def copied(self, wait: bool) -> bool:
        """Whether the last copy is complete; `wait` blocks until it is. Raises SaveFailed if it failed."""
        return self._copies.complete(wait=wait)

    def settle(self) -> None:
        self._copies.settle()

    def hand_over(self, path: str, step: Step) -> int:
        """Write what `save` writes, and the snapshots, for ranks that are to go on in the place of these; returns
        bytes. `step` is the one that comes next. Raises SaveFailed."""
        names = self._snapshots.names
        kept = {f"{SNAPSHOT}{name}": self._snapshots.chunks(name, self.changing) for name in names}
        state = {BUFFER: self.buffers(), **self._trained_state(), **kept}
        with contextlib.closing(StateCopies(self.device)) as copies:
            return copies.begin(Path(path), self.layout.rank, state, {**self._extra(step), "snapshots": names})

    def create_snapshot(self, name: str) -> None:
        """Keep the current weights in host memory as snapshot `name`, replacing any earlier one."""
        self._snapshots.create(name, self.changing)

    def load_snapshot(self, name: str, path: str) -> None:
        """Keep a model directory's weights as snapshot `name`; an empty path means the run's initial weights."""
        source = model_files(path, hf_config(self.config.model)) if path else self.initial_weights(self.changing)
        self._snapshots.load(name, self.changing, source)

    def drop_snapshot(self, name: str) -> None:
        self._snapshots.drop(name)

    @contextlib.contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """Run the block with the snapshot `weights` swapped in for the model's weights; "" changes nothing."""
        if not weights:
            yield
            return
        try:
            with self._snapshots.swapped(weights, self.changing):
                self.after_load({StateKey.PARAM}, None)
                yield
        finally:
            self.after_load({StateKey.PARAM}, None)

    def _gather_adapters(self, chunks: Sequence[Chunk], *, root: int | None) -> Adapters | None:
        """The whole adapters to merge, on rank `root`, or on all ranks if it is None; None elsewhere, and if there are
        none."""
        lora, found = self.config.lora, None
        for bucket in self._merged:
            numel = bucket.numel if root in (None, self.layout.rank) else 0  # only where they are needed
            where = self._gather_plan.memory("adapters", numel, torch.float32, self.device)
            found = self._gather_plan.gather(bucket, where, chunks=chunks, root=root, dtype=torch.float32)
        return None if lora is None or found is None else Adapters(self._merged[0].views(found), lora.scale)

    def _send(
        self,
        sender: WeightSender,
        bucket: Bucket,
        gathered: Manifest,
        stream: Manifest,
        *,
        chunks: Sequence[Chunk],
        root: int | None,
        merged: Adapters | None,
    ) -> int:
        """Gather a bucket on every rank and, if `root` is this rank or None, send it in the form of `stream`, with the
        adapters `merged`. Returns the bytes sent. Keeps no reference to the sender's memory."""
        holds, direct = root in (None, self.layout.rank), stream is gathered
        out: torch.Tensor | None = None
        if holds:
            out = self._room(sender, bucket, gathered) if direct else self._memory(bucket, gathered)
        with self.span("gather"):
            self.gather(bucket, out, chunks=chunks, root=root)
        if out is None:
            return 0
        if merged is not None:
            with self.span("merge"):
                merged.merge(bucket.views(out))
        as_sent = stream.buckets[bucket.index]
        if not direct:
            flat, out = out, self._room(sender, as_sent, stream)
            with self.span("quantize"):
                quantize(bucket, flat, as_sent, out, self._precise())
        with self.span("send"):
            sender.send(as_sent, out)
        return out.nbytes

    def _room(self, sender: WeightSender, bucket: Bucket, manifest: Manifest) -> torch.Tensor:
        """Memory for a bucket of `manifest`, [bucket.numel]: the sender's, or this rank's if the sender has none."""
        with self.span("wait for room"):
            room = sender.acquire_buffer(bucket.numel, getattr(torch, manifest.dtype))
        return self._memory(bucket, manifest) if room is None else room

    def _memory(self, bucket: Bucket, manifest: Manifest) -> torch.Tensor:
        """This rank's memory for a bucket, [bucket.numel]; reused for all buckets of `manifest`, since allocating costs
        more than writing."""
        use, dtype = f"bucket of {manifest.dtype}", getattr(torch, manifest.dtype)
        return self._gather_plan.memory(use, manifest.largest, dtype, self.device)[: bucket.numel]

    def on_device(self, kind: MemoryKind) -> list[torch.Tensor]:
        """The `tensors(kind)` that take memory on the role's device. A frozen role has parameters alone."""
        if self.config.frozen and kind is not MemoryKind.PARAM:
            return []
        return [tensor for tensor in self.tensors(kind) if tensor.device.type == self.device.type]

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
            held = self._meter.held(self._all_tensors())  # measured before a backend releases gathered parameters
            parts = held.described({kind: resident_bytes(self.on_device(kind)) for kind in MemoryKind})
        except Exception:  # half built, or stopped in mid-step: the error speaks for itself
            return ""
        if others := held.used - held.residual:
            parts += f"; other processes: {others / GIB:.3g} GiB"
        asked, free, _ = str(error).partition(" is free")  # after that come torch's own numbers
        less = LESS_IN_A_PASS if hook in ("forward_backward", "forward") else LESS_MEMORY
        return f"{type(error).__name__}: {asked}{free}; in use: {parts}; to need less, {less}"

    def _require_little(self, held: Held) -> None:
        """Raise MemoryHeld if all kinds sleep and more memory than the config allows is still held."""
        allowed = self.config.max_residual_gib
        if not allowed or held.residual <= allowed * GIB or self._sleeper.asleep != set(MemoryKind):
            return
        parts = held.described({kind: resident_bytes(self.on_device(kind)) for kind in MemoryKind})
        raise MemoryHeld(
            f"{held.residual / GIB:.3g} GiB of {self.device} are in use while everything is asleep, more than "
            f"cluster.max_residual_gib = {allowed:g}: {parts}; raise that limit, or free this memory"
        )

    def _all_tensors(self) -> Iterator[torch.Tensor]:
        for kind in MemoryKind:
            yield from self.on_device(kind)

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
        chunks = [chunk for chunk in self.local_state(StateKey.PARAM) if not _is_trained(chunk.name)]
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
        counters = dict.fromkeys(("world_size", "adam_step", "weights_version", "optimizer_step"), int)
        require_fields(extra, {**counters, "backend": str}, where=f"{saved}: extra")
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
        for name in extra.get("snapshots", ()):  # of ranks in whose place these go on; a checkpoint has none
            self._snapshots.make(name, self.changing, functools.partial(saved.take, f"{SNAPSHOT}{name}"))
        return int(extra["optimizer_step"])


def _is_trained(name: str) -> bool:
    """Whether a role with adapters trains the HF tensor of that name."""
    return is_adapter(name) or name == VALUE_HEAD_WEIGHT
