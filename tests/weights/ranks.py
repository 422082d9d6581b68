"""What each of two ranks does in test_gather.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from corerl.errors import ContractError
from corerl.weights.chunks import Chunk
from corerl.weights.gather import GatherPlan
from corerl.weights.manifest import build_manifest

CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    """The whole model, equal in every process."""
    generator = torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (64, 32),
        "norm": (32,),
        "q": (48, 32),
        "scale": (),
        "head": (64, 32),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def rows(name: str, whole: torch.Tensor, start: int, stop: int, *, replica: bool = False) -> Chunk:
    """Rows [start, stop) of a tensor, lying in storage of their own."""
    zeros = (0,) * (whole.ndim - 1)
    return Chunk(
        name,
        tuple(whole.shape),
        (start, *zeros),
        (stop - start, *whole.shape[1:]),
        whole[start:stop].clone(),
        replica,
    )


def sharded(rank: int) -> list[Chunk]:
    """Uneven rows, a column split, a replica, a 0-d tensor."""
    chunks = []
    for name, whole in tensors().items():
        if whole.ndim == 0:
            chunks.append(Chunk(name, (), (), (), whole.clone(), replica=rank != 1))
        elif name == "norm":
            chunks.append(rows(name, whole, 0, 32, replica=rank != 0))
        elif name == "q":
            half = whole[:, 16 * rank : 16 * rank + 16]
            chunks.append(Chunk(name, (48, 32), (0, 16 * rank), (48, 16), half))
        else:
            cut = 40
            chunks.append(rows(name, whole, 0, cut) if rank == 0 else rows(name, whole, cut, 64))
    return chunks


def staged(rank: int) -> list[Chunk]:
    """As in a pipeline: each tensor lies whole on one rank."""
    return [
        rows(name, whole, 0, len(whole)) if whole.ndim else Chunk(name, (), (), (), whole)
        for index, (name, whole) in enumerate(tensors().items())
        if index % 2 == rank
    ]


def copied(rank: int) -> list[Chunk]:
    """Every tensor lies whole on each rank."""
    return [
        rows(name, whole, 0, len(whole), replica=rank > 0)
        if whole.ndim
        else Chunk(name, (), (), (), whole.clone(), replica=rank > 0)
        for name, whole in tensors().items()
    ]


def stacks() -> dict[str, torch.Tensor]:
    """Fused weights of six experts: rows of the gate above those of the up projection, and the down projection."""
    generator = torch.Generator().manual_seed(7)
    return {"gate_up": torch.randn(6, 32, 32, generator=generator), "down": torch.randn(6, 32, 16, generator=generator)}


def matrices(stack: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert's, as views, in the order of files."""
    found = {}
    for expert in range(6):
        gate, up = stack["gate_up"][expert].chunk(2)
        found |= {f"{expert}.gate": gate, f"{expert}.up": up, f"{expert}.down": stack["down"][expert]}
    return found


def experts(rank: int) -> list[Chunk]:
    """Rank 0 has four experts' gate and up projections, rank 1 two, and each rank half of all rows of `down`."""
    chunks = []
    for name, view in matrices(stacks()).items():
        if "down" in name:
            half = view[16 * rank : 16 * rank + 16]
            chunks.append(Chunk(name, (32, 16), (16 * rank, 0), (16, 16), half))
        elif (int(name[0]) >= 4) == bool(rank):
            chunks.append(Chunk(name, (16, 32), (0, 0), (16, 32), view))
    return chunks


def dropped(rank: int) -> list[Chunk]:
    """Rank 1 leaves out its part of `head`."""
    return [chunk for chunk in sharded(rank) if not (rank == 1 and chunk.name == "head")]


def doubled(rank: int) -> list[Chunk]:
    """Both ranks say that `norm` is theirs to send."""
    return [Chunk(c.name, c.shape, c.offsets, c.sizes, c.view, c.replica and c.name != "norm") for c in sharded(rank)]


def misshapen(rank: int) -> list[Chunk]:
    """Rank 1 takes its part of `head` for the whole."""
    return [
        Chunk(c.name, (24, 32), (0, 0), c.sizes, c.view) if rank == 1 and c.name == "head" else c for c in sharded(rank)
    ]


def wrong_view(rank: int) -> list[Chunk]:
    """On rank 1 a view is larger than its box."""
    return [
        Chunk(c.name, c.shape, c.offsets, c.sizes, torch.zeros(40, 32)) if rank == 1 and c.name == "head" else c
        for c in sharded(rank)
    ]


class Largest(TorchDispatchMode):
    """Remembers the largest storage that any operation returned, in elements of float32; counts copies."""

    largest = copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.copies += func is torch.ops.aten.copy_.default
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // 4)
        return result


def gathered(
    make: Callable[[int], list[Chunk]], rank: int, root: int | None, dtype: str, bucket_bytes: int = 9000
) -> dict[str, object]:
    chunks = make(rank)
    plan = GatherPlan.build(chunks, dist.group.WORLD)
    manifest = build_manifest(plan.shapes, dtype=dtype, bucket_bytes=bucket_bytes)
    wanted = {**tensors(), **matrices(stacks())}
    received, right = 0, 0
    with Largest() as watch:
        for _ in range(2):  # the second time with the layouts that the first one made
            for bucket in manifest.buckets:
                out = plan.gather(bucket, None, chunks=chunks, root=root, dtype=getattr(torch, dtype), device=CPU)
                if out is None:
                    continue
                received += 1
                right += all(
                    torch.equal(value, wanted[name].to(value.dtype)) for name, value in bucket.views(out).items()
                )
    return {
        "order": [name for name, _ in plan.shapes],
        "stage_ranks": plan.stage_ranks,
        "buckets": len(manifest.buckets),
        "received": received,
        "right": right,
        "largest": watch.largest,
        "copies": watch.copies,
        "bucket": max(bucket.numel for bucket in manifest.buckets),
    }


def sent_of_copies(rank: int) -> list[str]:
    """The collectives and transfers that were called while rank 1 gathered what lies whole on both."""
    chunks = copied(rank)
    plan = GatherPlan.build(chunks, dist.group.WORLD)
    (bucket,) = build_manifest(plan.shapes, dtype="float32", bucket_bytes=1 << 20).buckets
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        plan.gather(bucket, None, chunks=chunks, root=1, dtype=torch.float32, device=CPU)
    return [event.key for event in seen.key_averages() if "c10d" in event.key or "gloo" in event.key]


def refused(make: Callable[[int], list[Chunk]], rank: int) -> str:
    try:
        GatherPlan.build(make(rank), dist.group.WORLD)
    except ContractError as error:
        return error.message
    return ""


def report() -> dict[str, Any]:
    """What each scenario gave on this rank."""
    rank = dist.get_rank()
    return {
        "sharded to root 0": gathered(sharded, rank, 0, "float32"),
        "sharded to root 1": gathered(sharded, rank, 1, "bfloat16"),
        "sharded to all": gathered(sharded, rank, None, "float32"),
        "staged to root 0": gathered(staged, rank, 0, "float32"),
        "staged to all": gathered(staged, rank, None, "bfloat16"),
        "copied to root 1": gathered(copied, rank, 1, "float32"),
        "copied to all": gathered(copied, rank, None, "bfloat16"),
        "experts to root 0": gathered(experts, rank, 0, "float32", bucket_bytes=3 * 1536 * 4),
        "experts to root 1": gathered(experts, rank, 1, "bfloat16"),
        "experts to all": gathered(experts, rank, None, "bfloat16"),
        "sent of copies": sent_of_copies(rank),
        "dropped": refused(dropped, rank),
        "doubled": refused(doubled, rank),
        "misshapen": refused(misshapen, rank),
        "wrong view": refused(wrong_view, rank),
    }
