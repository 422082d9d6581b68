"""Map a model's parameters and stored buffers to the Hugging Face tensors they consist of, and to the boxes of these on
this rank.

transformers fuses tensors as it loads them: a Qwen3-MoE layer has one `experts.gate_up_proj` [E, 2I, H], its files have
E gate and E up projections [I, H]. Each of those is a box of the parameter, so reading, sending and saving need no
copy of the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from corerl.errors import ModelError
from corerl.models.build import named_weights, stored_buffers
from corerl.models.lora import adapter_parameters
from corerl.weights.adapters import PREFIX, WEIGHT, B, adapted, adapters_of
from corerl.weights.chunks import Box, Chunk, intersect, within


@frozen
class HFBox:
    """One HF tensor as an axis-aligned box of one parameter."""

    name: str  # in the HF checkpoint
    shape: tuple[int, ...]  # of the HF tensor
    start: tuple[int, ...]  # where the box begins in the parameter, one entry for each of the parameter's dims
    axes: tuple[int | None, ...]  # the parameter's dim for each HF dim; None for an HF dim of size 1

    @property
    def box(self) -> Box:
        """(offsets, sizes) in the parameter."""
        sizes = [1] * len(self.start)
        for axis, size in zip(self.axes, self.shape, strict=True):
            if axis is not None:
                sizes[axis] = size
        return self.start, tuple(sizes)

    def view(self, full: Tensor) -> Tensor:
        """The HF tensor as a view of the whole parameter."""
        return self._oriented(full[within(self.box, ((0,) * full.dim(), tuple(full.shape)))])

    def chunk(self, box: Box, local: Tensor, *, replica: bool) -> Chunk | None:
        """The intersection of this tensor with a `box` of the parameter, as a view of `local`, which holds that box."""
        common = intersect(box, self.box)
        if common is None:
            return None
        offsets = tuple(0 if axis is None else common[0][axis] - self.start[axis] for axis in self.axes)
        sizes = tuple(1 if axis is None else common[1][axis] for axis in self.axes)
        view = self._oriented(local[within(common, box)])
        return Chunk(self.name, self.shape, offsets, sizes, view, replica)

    def _oriented(self, part: Tensor) -> Tensor:
        """A box in the parameter's dims as a view in the HF tensor's dims."""
        if self.axes == tuple(range(part.dim())):
            return part
        walked = [axis for axis in self.axes if axis is not None]
        rest = [axis for axis in range(part.dim()) if axis not in walked]
        part = part.permute(*rest, *walked)[(0,) * len(rest)]
        return part[tuple(None if axis is None else slice(None) for axis in self.axes)]


def hf_boxes(model: PreTrainedModel) -> dict[str, list[HFBox]]:
    """The HF tensors in each parameter and stored buffer, keyed by the names of `named_weights(model)`; a tied one
    appears once.

    Found by running transformers' own conversion for saving once on meta tensors: a few milliseconds and no memory.
    Adapters, which transformers does not know, have the names of `corerl.weights.adapters`.
    Raises ModelError if an HF tensor is not a box of one parameter, the boxes do not cover each element once, or a
    weight with an adapter is not one tensor in the files.
    """
    weights = named_weights(model)
    adapters = adapter_parameters(model)
    params = {
        name: torch.empty(weight.shape, device="meta") for name, weight in weights.items() if name not in adapters
    }
    # Meta tensors have no address; the storage object identifies each of them as long as `params` lives.
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in params.items()}
    with _CopiesAreViews():
        saved = revert_weight_conversion(model, dict(params))
    boxes: dict[str, list[HFBox]] = {name: [] for name in params}
    for name, tensor in saved.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        box = None if owner is None else _box(name, tensor, params[owner])
        if owner is None or box is None:
            raise ModelError(
                f"{type(model).__name__}: {name} {list(tensor.shape)} is computed from the model's parameters, "
                "expected a slice of one of them; CoreRL cannot send transformed weights"
            )
        boxes[owner].append(box)
    for name, tensor in params.items():
        if not _covered_once(tuple(tensor.shape), [box.box for box in boxes[name]]):
            raise ModelError(
                f"{type(model).__name__}: the HF tensors in {name} do not cover each of its elements exactly once"
            )
    for name in adapters:
        changed, shape = adapted(PREFIX + name), tuple(weights[name].shape)
        whole = boxes.get(changed, ())
        if len(whole) != 1 or not whole[0].name.endswith(WEIGHT) or whole[0].shape != tuple(weights[changed].shape):
            raise ModelError(
                f"{type(model).__name__} has no tensor {changed!r} of its own in its files, so that it cannot have an "
                "adapter; leave it out of lora.targets"
            )
        own = adapters_of(whole[0].name)[name.endswith(B)]
        boxes[name] = [HFBox(own, shape, (0,) * len(shape), tuple(range(len(shape))))]
    return boxes


def peft_names(model: PreTrainedModel) -> dict[str, str]:
    """The names that PEFT gives a model's adapters, after the modules that they belong to, by the names that CoreRL
    gives them, after the weights in the files."""
    boxes = hf_boxes(model)
    return {boxes[name][0].name: PREFIX + name for name in adapter_parameters(model)}


def named_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every HF tensor of the model by name, as a view of what holds it: a parameter, a part of one, or a buffer."""
    boxes = hf_boxes(model)
    return {box.name: box.view(weight.data) for name, weight in named_weights(model).items() for box in boxes[name]}


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model by HF name. Raises ModelError as `hf_boxes` does."""
    return {box.name: box.shape for boxes in hf_boxes(model).values() for box in boxes}


class _CopiesAreViews(TorchFunctionMode):
    """Replaces copies by the tensor itself, so that results are still views that tell their place in the parameter."""

    COPIES = (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone, torch.Tensor.to)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in self.COPIES else func(*args, **(kwargs or {}))


def _box(name: str, view: Tensor, param: Tensor) -> HFBox | None:
    """The box of `param` (contiguous, from offset 0) that `view` covers, or None if it is not a box."""
    start, rest = [], int(view.storage_offset())
    for stride in param.stride():
        start.append(rest // stride)
        rest %= stride
    axes: list[int | None] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            axes.append(None)
            continue
        fitting = [
            axis
            for axis in range(param.dim())
            if param.stride(axis) == stride and start[axis] + size <= param.shape[axis] and axis not in axes
        ]
        if not fitting:
            return None
        axes.append(fitting[0])
    return HFBox(name, tuple(view.shape), tuple(start), tuple(axes))


def _covered_once(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the boxes cover each element of the shape exactly once. Counts on the grid of all box edges, since an MoE
    layer has too many boxes to intersect in pairs."""
    edges = [
        np.unique([0, size, *(edge for start, n in boxes for edge in (start[dim], start[dim] + n[dim]))])
        for dim, size in enumerate(shape)
    ]
    counts = np.zeros([len(cuts) - 1 for cuts in edges], dtype=np.int64)
    for start, sizes in boxes:
        cells = tuple(
            slice(int(np.searchsorted(cuts, low)), int(np.searchsorted(cuts, low + n)))
            for cuts, low, n in zip(edges, start, sizes, strict=True)
        )
        counts[cells] += 1
    return bool((counts == 1).all())


def local_chunks(
    boxes: Sequence[HFBox],
    offsets: Sequence[int],
    sizes: Sequence[int],
    local: Tensor,
    *,
    replica: bool = False,
) -> list[Chunk]:
    """The parts of HF tensors in the box (offsets, sizes) of a parameter, as views of `local`, which holds that box.

    `boxes` are the parameter's, from `hf_boxes`. `local` may be the parameter itself, its master copy or a moment.
    Raises ModelError if the shape of `local` is not `sizes`.
    """
    if tuple(local.shape) != tuple(sizes):
        raise ModelError(f"the local tensor has shape {list(local.shape)}, expected {list(sizes)} at {list(offsets)}")
    held = (tuple(offsets), tuple(sizes))
    found = (box.chunk(held, local, replica=replica) for box in boxes)
    return [chunk for chunk in found if chunk is not None]


def buffer_chunks(model: PreTrainedModel, boxes: Mapping[str, Sequence[HFBox]], *, replica: bool) -> list[Chunk]:
    """The stored buffers of a model that has them whole; `replica` if an earlier rank has them too."""
    return [
        chunk
        for name, buffer in stored_buffers(model).items()
        for chunk in local_chunks(boxes[name], (0,) * buffer.dim(), tuple(buffer.shape), buffer, replica=replica)
    ]


def dtensor_boxes(tensor: Tensor, local: Tensor | None = None) -> list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    """(offsets, sizes, view) for each box of `tensor` that this rank holds; a plain tensor is one box.

    `view` is a view of the tensor's own local part, or of `local`, which has the same shape. Shards may be uneven,
    empty or strided (`_StridedShard`). A strided local part is several boxes, although torch's checkpoint hooks treat
    it as one. Raises ModelError on a partial sum.
    """
    if not isinstance(tensor, DTensor):
        part = (tensor if local is None else local).detach()
        return [((0,) * part.dim(), tuple(part.shape), part)] if part.numel() else []
    part = (tensor if local is None else local).detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or part.numel() == 0:
        return []
    runs = [[(0, size)] for size in tensor.shape]  # for each dim, the [start, stop) on this rank, in local order
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ModelError(f"a tensor of shape {list(tensor.shape)} is a partial sum; reduce it first")
        if placement.is_replicate():
            continue
        dim, factor = _shard(placement)
        ranks, rank = tensor.device_mesh.size(axis), coordinate[axis]
        pieces = [_nth(runs[dim], factor, i) for i in range(factor)]
        runs[dim] = [run for piece in pieces for run in _nth(piece, ranks, rank)]
    walks = [_with_local_start(dim_runs) for dim_runs in runs]
    held = tuple(sum(stop - start for start, stop in dim_runs) for dim_runs in runs)
    if held != tuple(part.shape):
        raise ModelError(
            f"this rank's part of a {list(tensor.shape)} tensor has shape {list(part.shape)}, expected {list(held)} "
            f"with {tensor.placements}"
        )
    return [
        (
            tuple(start for start, _, _ in combination),
            tuple(size for _, size, _ in combination),
            part[tuple(slice(at, at + size) for _, size, at in combination)],
        )
        for combination in itertools.product(*walks)
    ]


Run = tuple[int, int]


def _shard(placement: Placement) -> tuple[int, int]:
    """The dim that a placement shards, and its split factor: the shards of later mesh axes; 1 unless a _StridedShard.

    A _StridedShard is not a Shard in torch 2.11 and later; it has the same two attributes in all versions.
    """
    if not hasattr(placement, "dim"):
        raise ModelError(f"placement {placement} is neither a shard nor replicated")
    return int(placement.dim), int(getattr(placement, "split_factor", 1))


def _nth(runs: Sequence[Run], pieces: int, index: int) -> list[Run]:
    """Piece `index` of the elements in `runs`, split like torch.chunk: ceil(n / pieces) each, the last ones shorter."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // pieces)
    low, high = index * size, (index + 1) * size
    out, seen = [], 0
    for start, stop in runs:
        begin, end = max(low - seen, 0), min(high - seen, stop - start)
        if begin < end:
            out.append((start + begin, start + end))
        seen += stop - start
    return out


def _with_local_start(runs: Iterable[Run]) -> list[tuple[int, int, int]]:
    """(global start, size, local start) of each run, adjacent runs merged."""
    walk: list[tuple[int, int, int]] = []
    at = 0
    for start, stop in runs:
        if walk and walk[-1][0] + walk[-1][1] == start:
            walk[-1] = (walk[-1][0], walk[-1][1] + stop - start, walk[-1][2])
        else:
            walk.append((start, stop - start, at))
        at += stop - start
    return walk
