"""Find out where each tensor of the weight stream is stored in a rank's model, and sum its bits there.

SGLang fuses, shards, repeats and pads tensors, differently in each architecture. But it always ends in copies from a
tensor of the stream into a parameter. These are observed when a tensor is first loaded; afterwards its values can be
read there at any time. This needs no table of names and does not import SGLang.
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
from corerl.weights import FP8, SCALE, Bucket, bit_sums, is_adapter

COPY = torch.ops.aten.copy_
# What a loader may do to a part before copying it: make it contiguous, move it to a device. The last two are the names
# used in inference mode.
CLONES = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten.contiguous, torch.ops.aten.to)

# What transformers and SGLang (0.5.17) call the tower of Gemma 3: the second is in the files of its authors.
TOWER, OLD_TOWER = "vision_tower.", "vision_tower.vision_model."


class Model(Protocol):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load any subset of a checkpoint, by HF names; copies what it keeps."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def modules(self) -> Iterator[Any]: ...


@frozen
class Region:
    """A strided region of a tensor or storage; dims of size 1 are left out."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, start: int = 0) -> Region:
        """The region of `tensor` in its storage, relative to element `start`."""
        axes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
        shape, strides = tuple(size for size, _ in axes), tuple(stride for _, stride in axes)
        return cls(int(tensor.storage_offset()) - start, shape, strides)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@frozen
class Part:
    """A part of a stream tensor, and where it is stored in this rank."""

    source: Region  # in the tensor
    dtype: torch.dtype  # that the tensor came in
    parameter: str  # the name of the parameter or buffer
    address: int  # of the parameter's first element
    lies: Region  # in the parameter's storage


@frozen
class Sum:
    """The bit sum of one part in one rank."""

    source: Region
    bits: int


class Watch(TorchDispatchMode):
    """A context that records copies from a bucket's tensors into a model. It only sees its own thread, and only copies
    of strided parts; anything else stays unverified."""

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
        """(name, region) if `tensor` is part of one of the bucket's tensors, else None."""
        if clone := self._clones.get(_storage(tensor)):
            whole, name, source = clone
            return (name, source) if tensor.numel() == whole.numel() else None
        if _storage(tensor) != _storage(self._flat):
            return None
        width, item = self._flat.element_size(), tensor.element_size()
        begins = int(self._flat.storage_offset()) * width  # in bytes, since tensors of a bucket may differ in dtype
        element = (int(tensor.storage_offset()) * item - begins) // width
        entry = self._bucket.entries[bisect_right(self._starts, element) - 1]
        if tensor.dtype != self._dtypes[entry.name]:
            return None
        return entry.name, Region.of(tensor, (begins + entry.start * width) // item)


class Held:
    """Loads buckets into one rank's model, and knows where each tensor is stored in it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._parts: dict[str, list[Part]] = {}
        self._tower = any(name.startswith(OLD_TOWER) for name, _ in model.named_parameters())

    def load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Load the bucket into the model, recording where its tensors go unless that is known already. Adapters are
        passed over: the model itself has no place for them."""
        quantized = any(entry.dtype for entry in bucket.entries)
        weights = [(name, tensor) for name, tensor in bucket.views(flat).items() if not is_adapter(name)]
        called = [(self._called(name), tensor) for name, tensor in weights]
        if not weights:
            return
        if quantized and bucket.index == 0:
            _keys_as_they_are(self.model)
        if all(name in self._parts for name, _ in weights):
            self.model.load_weights(called)
        else:
            with Watch(self.model, bucket, flat) as watch:
                self.model.load_weights(called)
            if quantized:
                _require_form(watch.parts, _tensors(self.model))
            self._parts |= watch.parts
        _renew_copies(self.model)

    def _called(self, name: str) -> str:
        """What SGLang calls a tensor of the stream."""
        return name.replace(TOWER, OLD_TOWER, 1) if self._tower and name.startswith(TOWER) else name

    def sums(self) -> dict[str, list[Sum]]:
        """The bit sums of each tensor's parts on this rank, in the dtype it came in. Tensors with a part that has moved
        since it was recorded, or that is held in a coarser dtype, are left out."""
        tensors = _tensors(self.model)
        views: dict[str, torch.Tensor] = {}
        known: list[tuple[str, str, Part]] = []
        for name, parts in self._parts.items():
            if any(part.parameter not in tensors for part in parts):
                continue
            if any(tensors[part.parameter].data_ptr() != part.address for part in parts):
                continue
            if any(torch.promote_types(held := tensors[part.parameter].dtype, part.dtype) != held for part in parts):
                continue  # loading has rounded what was sent
            for number, part in enumerate(parts):
                key, lies = f"{number} {name}", part.lies
                known.append((name, key, part))
                views[key] = tensors[part.parameter].data.as_strided(lies.shape, lies.strides, lies.offset)
        came = {key: part.dtype for _, key, part in known}
        same = {key: view for key, view in views.items() if view.dtype == came[key]}
        bits = bit_sums(same)
        for key in views.keys() - same.keys():  # one at a time, since each needs a copy
            bits |= bit_sums({key: views[key].to(came[key])})
        sums: dict[str, list[Sum]] = {}
        for name, key, part in known:
            sums.setdefault(name, []).append(Sum(part.source, bits[key]))
        return sums


def whole_sums(
    engine: str, shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[Mapping[str, Sequence[Sum]]]
) -> dict[str, int]:
    """Sum each tensor's parts over ranks, counting every part once; incompletely known tensors are left out. Raises
    EngineFailed if copies of a part differ."""
    sums: dict[str, int] = {}
    for name, shape in shapes.items():
        parts: dict[Region, int] = {}
        for rank, reported in enumerate(ranks):
            for each in reported.get(name, ()):
                if parts.setdefault(each.source, each.bits) != each.bits:
                    raise EngineFailed(
                        f"{engine} has differing copies of {name!r}: the bits sum to {each.bits:#x} on rank {rank}, "
                        f"but to {parts[each.source]:#x} on another; the engine loads weights incorrectly"
                    )
        if parts and sum(part.numel for part in parts) == math.prod(shape):
            sums[name] = (sum(parts.values()) + 2**63) % 2**64 - 2**63
    return sums


def _require_form(parts: Mapping[str, Sequence[Part]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise EngineFailed if tensors of a quantized bucket went to parameters of another form. Loaders do this silently:
    they convert values, which are wrong without their scales, and skip scales that have no parameter."""
    for name, found in parts.items():
        for part in found:
            held = tensors[part.parameter].dtype
            # Others, such as norms, may be held in another precision.
            if held != part.dtype and (FP8 in (held, part.dtype) or name.endswith(SCALE)):
                raise EngineFailed(
                    f"{name!r} is sent as {_word(part.dtype)}, but SGLang stores it as {_word(held)}; if the server "
                    "does not quantize this layer, add it to weights.unquantized; if its kernels repack weights, "
                    "choose others (engines.sglang.server.fp8_gemm_runner_backend)"
                )
        if found and name + SCALE in parts and not parts[name + SCALE]:
            raise EngineFailed(
                f"{name!r} is loaded, but its scales are not: SGLang does not read them for this kind of model; set "
                "weights.quantize='none'"
            )


def _renew_copies(model: Model) -> None:
    """Bring the float32 copies that some routers multiply by up to date, in place, since CUDA graphs read them there.

    SGLang (0.5.15 to 0.5.17, `glm4_moe.py` and `glm4_moe_lite.py`) makes such a copy in the first pass and never again:
    tokens would go to the experts of the first weights for ever.
    """
    for module in model.modules():
        copy = getattr(module, "_weight_fp32", None)
        if isinstance(copy, torch.Tensor):
            with torch.inference_mode():  # in which SGLang makes it
                copy.copy_(module.weight)


def _keys_as_they_are(model: Model) -> None:
    """Set the FP8 scales of attention's keys and values to 1, as if a checkpoint has none: they are not in the stream,
    and sleeping loses their memory. Raises EngineFailed if SGLang, which initializes all parameters at random and then
    reads these scales, has read another value, which kernels may keep using.
    """
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            scale = getattr(module, f"{name}_float", None)
            if scale is None:
                continue
            if scale != 1.0:
                raise EngineFailed(
                    f"SGLang multiplies keys and values by {scale}, wanted 1.0: it initializes these scales at "
                    "random, and the versions that CoreRL knows then ignore them; set weights.quantize='none'"
                )
            getattr(module, name).data.fill_(scale)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(model: Model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
