"""The worker on each rank: loads its backend by name, joins its group, and passes verbs to the plugin host."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from attrs import define, evolve, frozen

from corerl.backend import Backend
from corerl.data.packing import StepShard, pack
from corerl.memory.device import empty_cache, lone_rank_options
from corerl.plan.roles import Assignment
from corerl.plugin.capabilities import Capability
from corerl.plugin.host import PluginHost
from corerl.plugin.observers import load_extensions
from corerl.plugin.origins import load_same
from corerl.plugin.pictures import picture_inputs
from corerl.plugin.registry import Kind, load_implementation, options_of
from corerl.plugin.spec import Process
from corerl.plugin.transports import open_sender, transport_named
from corerl.types import (
    TARGETS,
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MicroBatch,
    Output,
    PackedBatch,
    SampleBatch,
    Step,
    TrainResult,
    UpdateResult,
    merge_metrics,
)
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address, GuardedSender, WeightSender

SpanMaker: TypeAlias = Callable[[str], contextlib.AbstractContextManager[Any]]


@frozen(eq=False)
class TimedMicroBatches:
    """Iterates over micro-batches with a span for each, from when it is yielded until the next is requested; then opens
    a span `rest`, which ends with `following`."""

    micro_batches: Iterable[MicroBatch]
    count: int
    span: SpanMaker
    rest: str
    following: contextlib.ExitStack

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[MicroBatch]:
        self.following.close()  # the `rest` of an earlier loop
        for micro in self.micro_batches:
            with self.span("micro-batch"):
                yield micro
        self.following.enter_context(self.span(self.rest))


class Worker:
    """One rank of a role. Every method but `engine_failed` is called on all ranks of the group, in the same order."""

    def __init__(self, assignment: Assignment) -> None:
        self.context = assignment.context
        loaded, *_ = load_same(
            assignment.origins,
            (Kind.BACKENDS, assignment.backend),
            *((Kind.EXTENSIONS, choice.name) for choice in assignment.extensions),
            (Kind.TRANSPORTS, assignment.transport),
            (Kind.PICTURES, assignment.config.model.pictures),
        )
        options = options_of(loaded, assignment.config.options, path=f"backends.{loaded.name}")
        self.config = evolve(assignment.config, options=options)
        self.backend: Backend = load_implementation(Kind.BACKENDS, loaded)()
        self.backend.picture_inputs = picture_inputs(self.config.model)
        self.host = PluginHost(
            self.backend,
            name=loaded.name,
            extensions=load_extensions(assignment.extensions, self.context.run_dir, Process.WORKER),
            context=self.context,
            capabilities=loaded.spec.capabilities,
        )
        self.save, self.sleep, self.wake_up = self.host.save, self.host.sleep, self.host.wake_up
        self.sender: WeightSender | None = None
        self._lost: dict[str, dict[str, str]] = {}  # token of an address -> engine -> why it has failed
        self._owns_process_group = False
        self._starting = "start"  # phase of startup where the backend names none; "" after `init`
        self._span: SpanMaker | None = None
        self._compilations = Compilations()
        self._gradients: list[GradientResult] = []  # of the step that is not taken yet

    # ---- for heartbeats, during a verb -------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """The rank's startup phase; "" after `init`."""
        return self.backend.phase or self._starting

    # ---- tracing ----------------------------------------------------------------------------------------------------

    def trace(self, span: SpanMaker) -> None:
        """Record spans inside the verbs, as in `with span("gather"): ...`."""
        self._span = self.backend.span = span

    # ---- startup and shutdown ---------------------------------------------------------------------------------------

    def init(self, host: str, port: int, listening: int | None = None, token: str = "") -> InitResult:
        """Meet the other ranks at rank 0's address, then build, load and resume. Rank 0 takes over the socket
        `listening`, if one already listens at that address; for a single rank, port 0 will do. All keys in the
        ranks' store begin with `token`, which others cannot guess; "" adds nothing to them."""
        self._starting = "process group"
        self._join(host, port, listening, token)
        self._starting = "init"
        result = self.host.init(config=self.config, context=self.context)
        self._starting = ""
        return result

    def shutdown(self, reason: str) -> None:
        try:
            self.host.shutdown(reason=reason)
        finally:
            if self.sender is not None:
                self.sender.close()
            if self._owns_process_group:
                self._owns_process_group = False
                dist.destroy_process_group()

    # ---- verbs ------------------------------------------------------------------------------------------------------

    def train(self, samples: SampleBatch, shard: StepShard, loss: LossSpec, step: Step) -> TrainResult:
        """Both halves of a step that has no other samples; WrongState if it has."""
        self.host.require_allowed("train")
        with self._timed(self._pack_all("train", samples, shard), rest="optimizer") as batch:
            return self.train_on(batch, loss, step)

    def train_on(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        """`train` of samples that are packed already: the conformance suite (corerl_testing) calls it with its own."""
        self.add_gradients(batch, loss, last=True, at=step)
        return self.optimizer_step(step, 1.0)

    def forward_backward(
        self, samples: SampleBatch, shard: StepShard, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        """Pack this rank's shard of the samples, which are read in place, and add its gradients."""
        with self._timed(self._pack_all("forward_backward", samples, shard), rest="results") as batch:
            return self.add_gradients(batch, loss, outputs, last=last)

    def add_gradients(
        self,
        batch: PackedBatch,
        loss: LossSpec,
        outputs: tuple[Output, ...] = (),
        *,
        last: bool,
        at: Step | None = None,
    ) -> GradientResult:
        """`forward_backward` of samples that are packed already."""
        found = self.host.forward_backward(batch, loss, outputs, last, at=at)
        self._gradients.append(evolve(found, outputs=None))
        return found

    def optimizer_step(self, step: Step, scale: float) -> TrainResult:
        """Take the step, and report it with all that has led to it."""
        stepped = self.host.optimizer_step(step, scale)
        found, self._gradients = self._gradients, []
        metrics = merge_metrics({name: metric.scaled(scale) for name, metric in each.metrics.items()} for each in found)
        return TrainResult(
            applied=stepped.applied,
            metrics={**metrics, **stepped.metrics},
            grad_norm=stepped.grad_norm,
            tokens=sum(each.tokens for each in found),
            compilations=self._compilations.take(),
        )

    def forward(
        self,
        samples: SampleBatch,
        shard: StepShard,
        outputs: tuple[Output, ...],
        snapshot: str = "",
        replay: bool = False,
    ) -> ForwardResult:
        if replay or Output.ROUTED_EXPERTS in outputs:
            self._require_replay("forward")
        columns = [*samples.columns.keys() & {TARGETS}, *([Output.ROUTED_EXPERTS.value] if replay else [])]
        with self._timed(self._pack(samples, shard, columns=columns), rest="results") as batch:
            return self.host.forward(batch=batch, outputs=outputs, snapshot=snapshot)

    def manifest(self, adapters: bool = False) -> Manifest:
        return self.backend.stream(adapters=adapters).as_sent

    def update_weights(
        self, address: Address, version: int, verify: bool = False, adapters: bool = False, snapshot: str = ""
    ) -> UpdateResult:
        """With `verify`, the result has the sums of what this rank sent, or only rank 0's if all send the same."""
        self.backend.require(
            transport_named(address.transport).capability, f"update_weights over {address.transport!r}"
        )
        if self.sender is None or self.sender.address != address:
            if self.sender is not None:
                self.sender.close()
                self.sender = None  # also where there will be no other
            lost = self._lost.setdefault(address.token, {})
            self.sender = open_sender(address, rank=self.context.rank, lost=lost)
        sending = GuardedSender(self.sender, verify=verify)
        result = self.host.update_weights(sender=sending, version=version, adapters=adapters, snapshot=snapshot)
        return evolve(result, sums=sending.sums)

    def engine_failed(self, token: str, engine: str, reason: str) -> None:
        """Called in another thread, before or during an update at the address with this token: wait for this engine no
        more."""
        self._lost.setdefault(token, {})[engine] = reason

    def saved(self, wait: bool, memory: bool = False) -> bool:
        return self.backend.saved(wait, memory=memory)

    def clear_memory(self) -> None:
        """Give unused cached memory back to the device."""
        gc.collect()
        empty_cache(torch.device(self.config.device))

    def create_snapshot(self, name: str) -> None:
        with self.host.entering("snapshot"):
            self.backend.create_snapshot(name)

    def load_snapshot(self, name: str, path: str) -> None:
        with self.host.entering("snapshot"):
            self.backend.load_snapshot(name, path)

    def drop_snapshot(self, name: str) -> None:
        with self.host.entering("drop_snapshot"):
            self.backend.drop_snapshot(name)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _require_replay(self, verb: str) -> None:
        self.backend.require(Capability.ROUTING_REPLAY, f"{verb} with {Output.ROUTED_EXPERTS.value!r}")

    def _pack_all(self, verb: str, samples: SampleBatch, shard: StepShard) -> PackedBatch:
        """With every column that the role's loss may read. A critic's own routers choose among its own experts."""
        columns = [name for name in samples.columns if name != Output.ROUTED_EXPERTS or not self.config.value_head]
        if Output.ROUTED_EXPERTS in columns:
            self._require_replay(verb)
        return self._pack(samples, shard, columns=columns)

    def _pack(self, samples: SampleBatch, shard: StepShard, columns: Sequence[str]) -> PackedBatch:
        return pack(samples, shard, sequence_multiple=self.backend.layout.sequence_multiple, columns=columns)

    @contextlib.contextmanager
    def _timed(self, batch: PackedBatch, *, rest: str) -> Iterator[PackedBatch]:
        """Yield the batch; in a traced run, with spans for each micro-batch and for `rest`, what follows them."""
        if self._span is None:
            yield batch
            return
        with contextlib.ExitStack() as following:
            micro_batches = TimedMicroBatches(batch.micro_batches, batch.count, self._span, rest, following)
            yield evolve(batch, micro_batches=micro_batches)

    def _join(self, host: str, port: int, listening: int | None, token: str) -> None:
        if dist.is_initialized():  # by the tests of a backend
            return
        timeout = timedelta(seconds=self.config.timeout)
        ranks, on_gpu = self.context.world_size, self.config.device == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.context.local_rank)
        store = dist.TCPStore(
            host,
            port,
            world_size=ranks,
            is_master=self.context.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(token, store) if token else store,
            rank=self.context.rank,
            world_size=ranks,
            timeout=timeout,
            pg_options=lone_rank_options(timeout) if on_gpu and ranks == 1 else None,
        )
        self._owns_process_group = True


@define
class Compilations:
    """Counts the graphs that torch has compiled since it was last asked, first since this was made."""

    _until: int = 0  # microseconds: when the last one that was counted had ended

    def __attrs_post_init__(self) -> None:
        self.take()

    def take(self) -> int:
        # Not imported here: it takes a second, and only who compiles has it.
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return 0
        passes = [each for each in utils.get_compilation_metrics() if not each.is_runtime]  # the last 64
        new = [each for each in passes if (each.end_time_us or 0) > self._until]
        self._until = max([self._until, *(each.end_time_us or 0 for each in new)])
        graphs = {each.compile_id for each in new if each.is_forward is not False}  # a backward pass is no other graph
        return len(graphs)
