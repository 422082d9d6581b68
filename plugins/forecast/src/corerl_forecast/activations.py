"""Measure how much memory a model's passes take, without a device: on meta, tensors have sizes but no values."""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from corerl.models import Described, Policy, decoder_layers, make_policy, recompute_layers
from corerl.ops import PackedSequences
from corerl.types import Output

KNOWN = 64  # passes whose memory a process keeps: roles of one model ask alike
BLOCK = 512  # torch's allocator for CUDA rounds sizes up to a multiple of this
ITEM = torch.ops.aten._local_scalar_dense.default
# The partitioner of torch's compiler chooses what a compiled layer keeps; the rest of the compiler, which needs the
# device, does not change that.
PARTITIONED = "aot_eager_decomp_partition"


@frozen(kw_only=True)
class Activations:
    """Bytes that the passes of one micro-batch take beside the weights, of a model that is not split over ranks."""

    kept: int  # by the decoder's layers and the head, from the forward to the backward pass
    forward: int  # at the peak of a pass without gradients
    train: int  # at the peak of a forward and backward pass, without the gradients of weights


def activations_of(
    config: PreTrainedConfig,
    *,
    tokens: int,
    longest: int,
    precision: str,
    outputs: Sequence[Output],
    layout: str = "auto",
    recompute: bool = False,
    fused: bool = False,
) -> Activations:
    """The memory of passes on a micro-batch of `tokens` in sequences of at most `longest`.

    Layers keep what transformers' code keeps, or, if `fused`, what its compiled form does. Raises RuntimeError or
    another error of the model's code if that depends on values, which tensors on meta do not have.
    """
    return _activations(
        Described.of(config),
        tokens=tokens,
        longest=longest,
        precision=precision,
        outputs=tuple(outputs),
        layout=layout,
        recompute=recompute,
        fused=fused,
    )


@functools.lru_cache(KNOWN)
def _activations(
    described: Described,
    *,
    tokens: int,
    longest: int,
    precision: str,
    outputs: Sequence[Output],
    layout: str,
    recompute: bool,
    fused: bool,
) -> Activations:
    config, value_head = described.config, Output.VALUES in outputs

    def build(*, compiled: bool) -> Policy:
        policy = make_policy(
            config, dtype=getattr(torch, precision), layout=layout, value_head=value_head, buffers=False
        )
        for layer in decoder_layers(policy.model):
            if compiled:
                layer.forward = torch.compile(layer.forward, backend=PARTITIONED, dynamic=False)
            else:  # inside the layer, so that it is there too where the backward pass recomputes it
                layer.forward = partial(_with_fused_attention, layer.forward)
        if recompute:
            recompute_layers(policy.model)
        return policy

    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    inputs = _inputs(np.array([0, *itertools.accumulate(lengths)]))
    policy = build(compiled=False)
    for param in policy.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_forget)
    with _Allocations(policy) as held, torch.no_grad():
        policy(*inputs, 1.0, outputs)
    forward = held.peak
    with _Allocations(policy) as held:
        found = policy(*inputs, 1.0, outputs)
        kept = held.now
        torch.stack([each.sum() for each in found.values()]).sum().backward()
    train = held.peak
    if fused and not recompute:
        # A graph for all sizes takes three times as long, and a plan asks for few. Past the limit, layers would run as
        # they are.
        with torch._dynamo.config.patch(recompile_limit=KNOWN):
            fewer = _kept(build(compiled=True), inputs, outputs)
        kept, train = fewer, train - kept + fewer
    return Activations(kept=kept, forward=forward, train=train)


def _inputs(bounds: np.ndarray[Any, Any]) -> tuple[Tensor, PackedSequences, Tensor]:
    """The tokens, their packing and their positions, for `Policy.forward`."""
    tokens = torch.empty(int(bounds[-1]), dtype=torch.int64, device="meta")
    return tokens, PackedSequences.of(bounds, "meta"), torch.empty_like(tokens)


def _forget(param: Tensor) -> None:
    param.grad = None


def _kept(policy: Policy, inputs: tuple[Tensor, PackedSequences, Tensor], outputs: Sequence[Output]) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    # Not by following operators: a compiler does not run where something follows them.
    own = {_key(tensor.untyped_storage()) for tensor in _tensors(policy)}
    kept: dict[int, UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_meta and _key(storage) not in own:
            kept[_key(storage)] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), warnings.catch_warnings():
        # Torch's compiler asks hidden states for their gradients, and torch warns of it.
        warnings.filterwarnings(
            "ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning
        )
        policy(*inputs, 1.0, outputs)
    return sum(map(_size, kept.values()))


def _with_fused_attention(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _FusedAttention():
        return call(*args, **kwargs)


class _FusedAttention(TorchFunctionMode):
    """Has torch's attention take the kernel that it takes on a GPU; on meta it would take the one that holds all
    scores."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention and args[0].is_meta:
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The arguments of `scaled_dot_product_attention`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None:
        attn_mask = attn_mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    found: Tensor = attend(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return found


class _Allocations(TorchDispatchMode):
    """Follows the tensors on meta that operators make in the block, until each is gone."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self.now = 0
        self._sizes = {_key(tensor.untyped_storage()): 0 for tensor in _tensors(policy)}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ITEM and args[0].is_meta and args[0].dtype is torch.bool:
            return True  # asked by transformers: whether all positions of padded rows are in order, which they are
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: UntypedStorage) -> None:
        key = _key(storage)
        if key in self._sizes:
            return
        self._sizes[key] = _size(storage)
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _tensors(policy: nn.Module) -> Iterator[Tensor]:
    yield from policy.parameters()
    yield from policy.buffers()


def _key(storage: UntypedStorage) -> int:
    return int(storage._cdata)


def _size(storage: UntypedStorage) -> int:
    return -(-storage.nbytes() // BLOCK) * BLOCK
