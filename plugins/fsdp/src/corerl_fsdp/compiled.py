"""Compile decoder layers once, for all of them and whatever the lengths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from corerl.models import register_packed_attention
from corerl.ops import PackedSequences

# Inductor would make other kernels for few tokens than for many, in a compilation of 10 to 20 s at the first batch of
# fewer; those for many are right for all.
ALWAYS = "triton.mix_order_reduction_non_strict_mode"
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # read by torch whenever it compiles, and set to its default when it is imported


def keep_compiled(folder: str) -> None:
    """Have torch keep what this process compiles in `folder`, if there can be such a folder and neither the user nor
    an earlier model of the process has named one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    if folder and os.environ.get(CACHE, "") in ("", default_cache_dir()):
        with suppress(OSError, RuntimeError):  # a home that cannot be written, or none: then where torch does
            path = Path(folder).expanduser().absolute()
            path.mkdir(parents=True, exist_ok=True)
            os.environ[CACHE] = str(path)


def compile_forward(layers: Iterable[nn.Module], *, attention: bool) -> None:
    """Compile the layers' forward. Without `attention`, which is then no single kernel, attention is left out; a layer
    is then four pieces instead of one."""
    if not attention:
        register_packed_attention(compiled=False)
    for layer in layers:
        if attention:
            layer.forward = _with_lengths_marked(torch.compile(layer.forward, options=_options()))
        else:  # pieces also pass numbers on, which cannot be marked
            layer.forward = torch.compile(layer.forward, dynamic=True, options=_options())


def _options() -> dict[str, Any]:
    from torch._inductor import config  # slow to import

    return {ALWAYS: True} if ALWAYS in config.get_config_copy() else {}


def _with_lengths_marked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the compiler which sizes change: the number of packed tokens and that of sequences. If all may, as with
    `dynamic=True`, it reasons about head sizes too, for most of half a minute."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                _mark(each)
            elif isinstance(each, PackedSequences):
                _mark(each.cu_seqlens)
                if (prefixes := each.prefixes) is not None:
                    whole = prefixes.sequences.cu_seqlens
                    for lengths in (whole, prefixes.place, prefixes.copies, prefixes.first_copy):
                        _mark(lengths)
        return forward(*args, **kwargs)

    return marked


def _mark(tensor: Tensor) -> None:
    """[1, T, ...] has tokens in its second dim, [n] whatever it has."""
    for each in (tensor, tensor._base):  # FSDP hands on views, and the compiler looks behind them
        if each is not None and each.ndim:
            torch._dynamo.maybe_mark_dynamic(each, min(each.ndim, 2) - 1)
