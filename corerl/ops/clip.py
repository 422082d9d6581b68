"""The norm of all gradients, whatever meshes they are sharded over, the factor that clips by it, and scaling.

`torch.nn.utils.clip_grad_norm_` refuses gradients on several meshes, and a mix of plain and sharded ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def grad_norm(params: Iterable[Tensor]) -> Tensor:
    """L2 norm of the whole model's gradients, 0-d float32, on the device of the last parameter.

    Called on every rank with the same parameters in the same order: one all-reduce for each sharded mesh axis, and one
    for each axis along which ranks have summed separately, so that all have the same number. Plain and replicated ones
    count once. A parameter without a gradient counts as zero.
    Raises ValueError on a gradient that is still a partial sum.
    """
    squares: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    device = torch.device("cpu")
    for param in params:
        device = param.device
        # A parameter whose gradient is missing on this rank alone still takes part in the all-reduce.
        tensor = param if param.grad is None else param.grad
        mesh: DeviceMesh | None = None
        axes: tuple[int, ...] = ()
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise ValueError(
                    f"gradient of shape {list(tensor.shape)} is a partial sum; reduce it before computing its norm"
                )
            # Not is_shard(): it is False for a _StridedShard, which is sharded.
            axes = tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())
            mesh = tensor.device_mesh if axes else None
        group = squares.setdefault((mesh, axes), [])
        if param.grad is not None:
            group.append(torch.linalg.vector_norm(_local(param.grad), dtype=torch.float32).square())
    total = torch.zeros((), dtype=torch.float32, device=device)
    separate: dict[DeviceMesh, set[int]] = {}  # the axes along which sums may differ in the last bit
    for (sharded_over, along), parts in squares.items():
        part = torch.stack(parts).sum() if parts else torch.zeros_like(total)
        if sharded_over is not None:
            for axis in along:
                dist.all_reduce(part, group=sharded_over.get_group(axis))
            separate.setdefault(sharded_over, set()).update({*range(sharded_over.ndim)} - {along[-1]})
        total += part.to(device)
    # Groups of three or more may each add in an order of their own; replicas would be clipped by different factors.
    for summed_over, between in separate.items():
        for axis in sorted(between):
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=summed_over.get_group(axis))
    return total.sqrt()


def clip_factor(max_norm: float, norm: float) -> float:
    """What to multiply gradients of norm `norm` by, so that it becomes at most `max_norm`; 1 if `max_norm` is 0."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


@torch.no_grad()
def scale_grads(params: Iterable[Tensor], factor: float) -> None:
    """Multiply this rank's gradients in place; a factor of 1 leaves them alone."""
    if factor == 1.0:
        return
    grads: dict[torch.device, list[Tensor]] = {}  # a device's in one call
    for param in params:
        if param.grad is not None:
            own = _local(param.grad)
            grads.setdefault(own.device, []).append(own)
    for of_device in grads.values():
        torch._foreach_mul_(of_device, factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
