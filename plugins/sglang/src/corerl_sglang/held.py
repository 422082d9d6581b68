"""Where each tensor of the weight stream lies in a rank's model, seen as it is loaded; what its bits there sum to.

SGLang fuses tensors, cuts them over ranks, repeats them and pads them, each architecture in its own way. Whatever the
way, it ends in copies from a tensor of the stream into a parameter. These are watched when a tensor is loaded for the
first time; from then on what lies there can be read at any moment. No table of names is needed, and no SGLang imported.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode

from corerl.errors import EngineFailed
from corerl.weights.manifest import Bucket
from corerl.weights.quantize import FP8, SCALE
from corerl.weights.verify import bit_sums

COPY = torch.ops.aten.copy_
# What a loader may do to a part before it copies it: make it contiguous, bring it to a device. Inference mode has names
# of its own for that.
CLONES = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten.contiguous, torch.ops.aten.to)


class Model(Protocol):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Takes any part of a checkpoint, under its Hugging Face names; copies what it keeps."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def modules(self) -> Iterator[Any]: ...


@frozen
class Region:
    """Elements of a tensor or a storage; axes of one element are left out."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, start: int = 0) -> Region:
        """Where `tensor` lies in its storage, from element `start` on."""
        axes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
        shape, strides = tuple(size for size, _ in axes), tuple(stride for _, stride in axes)
        return cls(int(tensor.storage_offset()) - start, shape, strides)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@frozen
class Part:
    """A part of a tensor of the stream, and where it lies in this rank."""

    source: Region  # in the tensor
    dtype: torch.dtype  # in which the tensor came
    parameter: str  # or a buffer
    address: int  # of its first element
    lies: Region  # in its storage


@frozen
class Sum:
    """What the bits of one part sum to in one rank."""

    source: Region
    bits: int


class Watch(TorchDispatchMode):
    """While it is entered, notes what is copied from a bucket's tensors into a model. It sees its own thread alone, and
    no copy that is not one of a strided part: what it does not see, nobody can tell of."""

    def __init__(self, model: Model, bucket: Bucket, flat: torch.Tensor) -> None:
        super().__init__()
        self.parts: dict[str, list[Part]] = {entry.name: [] for entry in bucket.entries}
        self._owners = {_storage(tensor): (name, tensor) for name, tensor in _tensors(model).items()}
        self._bucket, self._flat = bucket, flat
        self._starts = [entry.start for entry in bucket.entries]
        self._dtypes = {name: view.dtype for name, view in bucket.views(flat).items()}
        self._clones: dict[int, tuple[torch.Tensor, str, Region]] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator is COPY and args[0].shape == args[1].shape:
            owner, found = self._owners.get(_storage(args[0])), self._source(args[1])
            if owner and found:
                (parameter, tensor), (name, source) = owner, found
                dtype = self._dtypes[name]
                self.parts[name].append(Part(source, dtype, parameter, tensor.data_ptr(), Region.of(args[0])))
        elif operator in CLONES and _storage(done) != _storage(args[0]) and (found := self._source(args[0])):
            self._clones[_storage(done)] = done, *found
        return done

    def _source(self, tensor: torch.Tensor) -> tuple[str, Region] | None:
        """Which of the bucket's tensors it is a part of, and which part."""
        if clone := self._clones.get(_storage(tensor)):
            whole, name, source = clone
            return (name, source) if tensor.numel() == whole.numel() else None
        if _storage(tensor) != _storage(self._flat):
            return None
        width, item = self._flat.element_size(), tensor.element_size()
        begins = int(self._flat.storage_offset()) * width  # in bytes, as tensors of a bucket may differ in dtype
        element = (int(tensor.storage_offset()) * item - begins) // width
        entry = self._bucket.entries[bisect_right(self._starts, element) - 1]
        if tensor.dtype != self._dtypes[entry.name]:
            return None
        return entry.name, Region.of(tensor, (begins + entry.start * width) // item)


class Held:
    """What one rank's model holds."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._parts: dict[str, list[Part]] = {}

    def load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Load it into the model, and see where it goes, where that is not known yet."""
        quantized = any(entry.dtype for entry in bucket.entries)
        weights = list(bucket.views(flat).items())
        if quantized and bucket.index == 0:
            _keys_as_they_are(self.model)
        if all(name in self._parts for name, _ in weights):
            self.model.load_weights(weights)
            return
        with Watch(self.model, bucket, flat) as watch:
            self.model.load_weights(weights)
        if quantized:
            _require_form(watch.parts, _tensors(self.model))
        self._parts |= watch.parts

    def sums(self) -> dict[str, list[Sum]]:
        """The sum of each part of each tensor here, in the dtype in which it came. A tensor of which a part has moved
        since it was seen is left out."""
        tensors = _tensors(self.model)
        views: dict[str, torch.Tensor] = {}
        known: list[tuple[str, str, Part]] = []
        for name, parts in self._parts.items():
            if any(part.parameter not in tensors for part in parts):
                continue
            if any(tensors[part.parameter].data_ptr() != part.address for part in parts):
                continue
            for number, part in enumerate(parts):
                key, lies = f"{number} {name}", part.lies
                known.append((name, key, part))
                views[key] = tensors[part.parameter].data.as_strided(lies.shape, lies.strides, lies.offset)
        came = {key: part.dtype for _, key, part in known}
        same = {key: view for key, view in views.items() if view.dtype == came[key]}
        bits = bit_sums(same)
        for key in views.keys() - same.keys():  # one at a time: a copy of each
            bits |= bit_sums({key: views[key].to(came[key])})
        told: dict[str, list[Sum]] = {}
        for name, key, part in known:
            told.setdefault(name, []).append(Sum(part.source, bits[key]))
        return told


def whole_sums(
    engine: str, shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[Mapping[str, Sequence[Sum]]]
) -> dict[str, int]:
    """Sums of tensors whose parts are all somewhere, each part counted once. Raises EngineFailed where a part that lies
    in several places is not the same in all."""
    sums: dict[str, int] = {}
    for name, shape in shapes.items():
        parts: dict[Region, int] = {}
        for rank, told in enumerate(ranks):
            for each in told.get(name, ()):
                if parts.setdefault(each.source, each.bits) != each.bits:
                    raise EngineFailed(
                        f"{engine} holds copies of {name!r} that differ: rank {rank}'s bits sum to {each.bits:#x}, and "
                        f"others' to {parts[each.source]:#x}; it loads weights wrongly"
                    )
        if parts and sum(part.numel for part in parts) == math.prod(shape):
            sums[name] = (sum(parts.values()) + 2**63) % 2**64 - 2**63
    return sums


def _require_form(parts: Mapping[str, Sequence[Part]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises EngineFailed where tensors of a quantised bucket went to parameters of another form. A loader says nothing
    of that: it converts bits, which without their scales are other numbers, and passes over scales that it has no
    parameter for."""
    for name, found in parts.items():
        for part in found:
            held = tensors[part.parameter].dtype
            # Others, such as norms, may be held in a precision of their own.
            if held != part.dtype and (FP8 in (held, part.dtype) or name.endswith(SCALE)):
                raise EngineFailed(
                    f"{name!r} comes as {_word(part.dtype)} and is held as {_word(held)}; either the server does not "
                    "quantise this layer, then name it in weights.unquantized, or its kernels want a form of their "
                    "own, then choose others (engines.sglang.server.fp8_gemm_runner_backend)"
                )
        if found and name + SCALE in parts and not parts[name + SCALE]:
            raise EngineFailed(
                f"{name!r} is loaded and its scales are not: SGLang does not read them for this kind of model; set "
                "weights.quantize='none'"
            )


def _keys_as_they_are(model: Model) -> None:
    """Sets the scales of attention's keys and values in FP8 to 1, as where a checkpoint has none: they are in no
    stream, and a sleep takes away their memory. Raises EngineFailed where SGLang, which writes random numbers to all
    parameters as it starts and reads these scales then, has got another one, which kernels may have been told for good.
    """
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            told = getattr(module, f"{name}_float", None)
            if told is None:
                continue
            if told != 1.0:
                raise EngineFailed(
                    f"SGLang multiplies keys and values by {told}, wanted 1.0: it draws scales at random as it starts, "
                    "which the versions that CoreRL knows then pass over; set weights.quantize='none'"
                )
            getattr(module, name).data.fill_(told)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(model: Model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
