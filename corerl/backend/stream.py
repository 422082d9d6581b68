"""Gather a rank's weights bucket by bucket, and send them to engines."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen

from corerl.backend.primitives import Primitives
from corerl.errors import Unsupported
from corerl.types import UpdateResult
from corerl.weights.adapters import Merge, is_adapter, plan_merges
from corerl.weights.chunks import Chunk
from corerl.weights.gather import GatherPlan, all_gather_json
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.quantize import convert_bucket, converted_manifest
from corerl.weights.transport import WeightSender


@frozen
class Stream:
    """What one kind of update sends."""

    gathered: Manifest
    converted: Manifest | None = None  # the same buckets, with quantized tensors or more precise buffers
    precise_bucket: Bucket | None = None  # those buffers, which are gathered in float32

    @property
    def as_sent(self) -> Manifest:
        return self.converted or self.gathered


class WeightStream(Primitives):
    """The hook `update_weights`."""

    def _plan_stream(self) -> None:
        """Cut the weights, which are loaded, into buckets. Called on every rank."""
        self._gather_plan = GatherPlan.build(self.weights, self.group)
        weights, shapes = self.config.weights, self._gather_plan.shapes
        dtype = self.config.train.precision if weights.dtype == "model" else weights.dtype
        cut = functools.partial(
            build_manifest, dtype=dtype, bucket_bytes=weights.bucket_bytes, stage_ranks=self._gather_plan.stage_ranks
        )
        adapters = [each for each in shapes if is_adapter(each[0])]
        separate = weights.lora == "adapter"
        self._adapter_stream = Stream(cut(adapters)) if adapters and separate else None
        self._adapter_bucket: Bucket | None = None  # of adapters to merge
        if adapters and not separate:
            self._adapter_bucket = _float32_bucket(adapters)  # merging needs both matrices of an adapter
        self._stream = self._stream_of(cut([each for each in shapes if separate or not is_adapter(each[0])]))
        self._merges: list[list[Merge]] = []  # of each bucket
        if self._adapter_bucket is not None and (lora := self.config.lora) is not None:
            buckets = self._stream.gathered.buckets
            self._merges = [plan_merges(bucket, self._adapter_bucket, lora.scale) for bucket in buckets]

    def _stream_of(self, gathered: Manifest) -> Stream:
        """Weights of this manifest, in the form that engines get. Called on every rank."""
        weights = self.config.weights
        fp8, dtypes = weights.quantize == "fp8", self._precise_dtypes(gathered)
        if not fp8 and not dtypes:
            return Stream(gathered)
        shapes = [each for each in self._gather_plan.shapes if each[0] in dtypes]
        converted = converted_manifest(gathered, weights.unquantized, fp8=fp8, dtypes=dtypes)
        return Stream(gathered, converted, _float32_bucket(shapes) if shapes else None)

    def stream(self, *, adapters: bool) -> Stream:
        """What an update of all weights sends, or one of adapters alone. Raises Unsupported if these are merged, or
        there are none."""
        if not adapters:
            return self._stream
        if self._adapter_stream is None:
            raise Unsupported(
                f"the {self.context.role} sends no separate adapters; set [lora] and weights.lora='adapter', or "
                "send all weights"
            )
        return self._adapter_stream

    def update_weights(self, sender: WeightSender, version: int, adapters: bool) -> UpdateResult:
        started = time.perf_counter()
        stream = self.stream(adapters=adapters)
        roots = [sender.sending_rank(bucket) for bucket in stream.gathered.buckets]
        sends = None in roots or self.layout.rank in roots
        sent = 0
        chunks = self.weights  # before meeting the engines, which get ready meanwhile
        try:  # `sender`, a GuardedSender, never raises, so that no rank is left in a gather: `finish` reports
            root_of_all = roots[0] if len(set(roots)) == 1 else None
            merged = self._adapter_bucket if self._merges else None
            to_merge = self._gather_float32(merged, "adapters", chunks, root=root_of_all)
            buffers = self._gather_float32(stream.precise_bucket, "buffers", chunks, root=root_of_all)
            precise = {} if stream.precise_bucket is None or buffers is None else stream.precise_bucket.views(buffers)
            if sends:
                with self.span("meet engines"):
                    sender.open(stream.as_sent, version)
            for bucket, root in zip(stream.gathered.buckets, roots, strict=True):
                out = self._gathered(sender, bucket, stream, chunks=chunks, root=root)
                if out is not None:
                    sent += self._send(sender, bucket, out, stream, to_merge=to_merge, precise=precise)
                del out  # the sender's memory
        finally:
            self._gather_plan.release()
        engines: Mapping[str, str] = {}
        if sends:
            with self.span("wait for engines"):
                engines = sender.finish()
            sent = sent if sender.bytes_sent is None else sender.bytes_sent
        self.weights_version = version
        return UpdateResult(bytes=sent, seconds=time.perf_counter() - started, engines=engines)

    def gather(self, bucket: Bucket, out: torch.Tensor | None, *, chunks: Sequence[Chunk], root: int | None) -> None:
        """Fill `out` [bucket.numel] with the bucket's full HF tensors on rank `root`, or on all ranks if it is None.
        `out` is None on ranks that do not need it; `chunks` are this rank's parameters, on the device or not."""
        dtype = getattr(torch, self._stream.gathered.dtype)
        self._gather_plan.gather(bucket, out, chunks=chunks, root=root, dtype=dtype, device=self.device)

    def _precise_dtypes(self, gathered: Manifest) -> dict[str, str]:
        """Name -> dtype of the buffers that the manifest's dtype would round: such as decide which experts a token goes
        to. Called on every rank, since a pipeline stage has only its own buffers."""
        dtype = getattr(torch, gathered.dtype)
        own = {
            chunk.name: str(chunk.view.dtype).removeprefix("torch.")
            for chunk in self.buffers()
            if torch.promote_types(chunk.view.dtype, dtype) != dtype
        }
        ranks = [own] if self.group is None else all_gather_json(own, self.group)
        return {name: held for buffers in ranks for name, held in buffers.items()}

    def _gather_float32(
        self, bucket: Bucket | None, use: str, chunks: Sequence[Chunk], *, root: int | None
    ) -> torch.Tensor | None:
        """The bucket [bucket.numel] in float32 on rank `root`, or on all ranks if it is None; None elsewhere, and if
        there is none. `use` names its memory."""
        if bucket is None:
            return None
        plan, device, receives = self._gather_plan, self.device, root in (None, self.layout.rank)
        out = plan.memory(use, bucket.numel, torch.float32, device) if receives else None
        return plan.gather(bucket, out, chunks=chunks, root=root, dtype=torch.float32, device=device)

    def _gathered(
        self, sender: WeightSender, bucket: Bucket, stream: Stream, *, chunks: Sequence[Chunk], root: int | None
    ) -> torch.Tensor | None:
        """Gather a bucket on every rank; returns it [bucket.numel] if `root` is this rank or None."""
        out: torch.Tensor | None = None
        if root in (None, self.layout.rank):
            # Converting is into the sender's memory.
            direct, manifest = stream.converted is None, stream.gathered
            out = self._room(sender, bucket, manifest) if direct else self._memory(bucket, manifest)
        with self.span("gather"):
            self.gather(bucket, out, chunks=chunks, root=root)
        return out

    def _send(
        self,
        sender: WeightSender,
        bucket: Bucket,
        out: torch.Tensor,
        stream: Stream,
        *,
        to_merge: torch.Tensor | None,
        precise: Mapping[str, torch.Tensor],
    ) -> int:
        """Send a gathered bucket in the form that engines get. Returns the bytes sent. Keeps no reference to the
        sender's memory."""
        if to_merge is not None:
            with self.span("merge"):
                for merge in self._merges[bucket.index]:
                    merge.add(out, to_merge)
        if stream.converted is not None:
            flat, bucket_sent = out, stream.converted.buckets[bucket.index]
            out = self._room(sender, bucket_sent, stream.converted)
            with self.span("quantize"):
                convert_bucket(bucket, flat, bucket_sent, out, precise)
            bucket = bucket_sent
        with self.span("send"):
            sender.send(bucket, out)
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


def _float32_bucket(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Bucket:
    """One bucket for all of these tensors, which are small."""
    (bucket,) = build_manifest(shapes, dtype="float32", bucket_bytes=sys.maxsize).buckets
    return bucket
