"""Gather a rank's weights bucket by bucket, and send them to engines."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from corerl.backend.primitives import Primitives
from corerl.errors import Unsupported
from corerl.types import UpdateResult
from corerl.weights.adapters import Adapters, is_adapter
from corerl.weights.chunks import Chunk
from corerl.weights.gather import GatherPlan
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.quantize import quantize, quantized
from corerl.weights.transport import WeightSender


class WeightStream(Primitives):
    """The hook `update_weights`."""

    def _plan_stream(self) -> None:
        """Cut the weights, which are loaded, into buckets. Called on every rank."""
        self._gather_plan = GatherPlan.build(self.weights, self.group)
        weights, shapes = self.config.weights, self._gather_plan.shapes
        dtype = self.config.train.precision if weights.dtype == "model" else weights.dtype
        cut = functools.partial(
            build_manifest, dtype=dtype, bucket_bytes=weights.bucket_bytes, senders=self._gather_plan.senders
        )
        adapters = [each for each in shapes if is_adapter(each[0])]
        separate = weights.lora == "adapter"
        self._alone = cut(adapters) if adapters and separate else None
        # One bucket: they are small, and whoever merges a weight needs both of its adapter's matrices.
        merges = adapters and not separate
        merged = build_manifest(adapters, dtype="float32", bucket_bytes=sys.maxsize) if merges else None
        self._merged = () if merged is None else merged.buckets
        self.manifest: Manifest = cut([each for each in shapes if separate or not is_adapter(each[0])])

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
                    sender.open(stream, version)
            for bucket, root in zip(gathered.buckets, roots, strict=True):
                sent += self._send(sender, bucket, gathered, stream, chunks=chunks, root=root, merged=merged)
        finally:
            self._gather_plan.release()
        engines: Mapping[str, str] = {}
        if sends:
            with self.span("wait for engines"):
                engines = sender.finish()
            sent = sent if sender.sent is None else sender.sent
        self.weights_version = version
        return UpdateResult(version=version, bytes=sent, seconds=time.perf_counter() - started, engines=engines)

    def gather(self, bucket: Bucket, out: torch.Tensor | None, *, chunks: Sequence[Chunk], root: int | None) -> None:
        """Fill `out` [bucket.numel] with the bucket's full HF tensors on rank `root`, or on all ranks if it is None.
        `out` is None on ranks that do not need it; `chunks` are this rank's parameters, on the device or not."""
        dtype = getattr(torch, self.manifest.dtype)
        # Buckets travel between devices, even if a rank's chunks are in host memory.
        where = torch.empty(0, device=self.device) if out is None else out
        self._gather_plan.gather(bucket, where, chunks=chunks, root=root, dtype=dtype)

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
                f"the {self.context.role} sends no separate adapters; set [lora] and weights.lora='adapter', or "
                "send all weights"
            )
        return self._alone

    def _precise(self) -> dict[str, torch.Tensor]:
        """The buffers that the manifest's dtype would round: such as decide which experts a token goes to."""
        sent = getattr(torch, self.manifest.dtype)
        return {
            chunk.name: chunk.view for chunk in self.buffers() if torch.promote_types(chunk.view.dtype, sent) != sent
        }

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
