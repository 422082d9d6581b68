"""Map a model's parameters and stored buffers to the Hugging Face tensors they consist of, and to the boxes of these on
this rank.

transformers fuses tensors as it loads them: a Qwen3-MoE layer has one `experts.gate_up_proj` [E, 2I, H], its files have
E gate and E up projections [I, H]. Each of those is a box of the parameter, so reading, sending and saving need no
copy of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from corerl.errors import ModelError
from corerl.models.build import named_weights, stored_buffers
from corerl.models.lora import adapted_parameter, adapter_parameters
from corerl.weights.adapters import PREFIX, WEIGHT, adapters_of
from corerl.weights.chunks import Box, Chunk, holes, intersect, within


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
    shapes = {name: tuple(tensor.shape) for name, tensor in params.items()}
    if wrong := holes(shapes, ((name, box.box) for name, found in boxes.items() for box in found)):
        raise ModelError(
            f"{type(model).__name__}: the HF tensors in {next(iter(wrong))} do not cover each of its elements exactly "
            "once"
        )
    for name, param in adapters.items():
        changed = adapted_parameter(name)
        found = _adapter_boxes(boxes.get(changed, ()), tuple(weights[changed].shape), name, tuple(param.shape))
        if not found:
            raise ModelError(
                f"{type(model).__name__} has no tensor {changed!r} of its own in its files, so that it cannot have an "
                "adapter; leave it out of lora.targets"
            )
        boxes[name] = found
    return boxes


def peft_names(model: PreTrainedModel) -> dict[str, str]:
    """The names that PEFT gives a model's adapters, after the modules that they belong to, by the names that CoreRL
    gives them, after the weights in the files."""
    boxes = hf_boxes(model)
    return {
        box.name: PREFIX + name
        if name.endswith(WEIGHT)
        else box.name  # PEFT takes each layer of an expert for a module
        for name in adapter_parameters(model)
        for box in boxes[name]
    }


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


def _adapter_boxes(whole: Sequence[HFBox], weight: tuple[int, ...], name: str, shape: tuple[int, ...]) -> list[HFBox]:
    """The A or B of each HF tensor in a parameter of the shape `weight`, in the adapter's parameter; none unless those
    are matrices [out, in] of one size, with all of the parameter's inputs."""
    rows = {box.shape[0] for box in whole}
    parts = len(whole) if len(weight) == 2 else 1  # a linear layer has one adapter, whose A its parts would share
    if (
        len(rows) != 1
        or parts != 1
        or not all(box.name.endswith(WEIGHT) and box.shape == (*rows, weight[-1]) for box in whole)
    ):
        return []
    (out,), axes, is_b = rows, (len(weight) - 2, len(weight) - 1), "lora_B" in name
    rank = shape[-1] if is_b else shape[-2] * out // weight[-2]
    found = []
    for box in whole:
        *above, row, _ = box.start
        own = adapters_of(box.name)[is_b]
        if is_b:
            found.append(HFBox(own, (out, rank), (*above, row, 0), axes))
        else:
            found.append(HFBox(own, (rank, weight[-1]), (*above, row // out * rank, 0), axes))
    return found


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
