"""Gradients on a mesh of one rank: FSDP's copies of them become one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class OneRankReduce:
    """For `FSDPModule.set_custom_reduce_scatter`. torch (2.9 to 2.13) casts a unit's gradients into the input of a
    reduce-scatter and copies that, on one rank, into the output; here both are one tensor, which it copies to itself:
    that does nothing."""

    def __init__(self) -> None:
        self._input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called twice a reduction: for the input, and on the stream of reductions for the output."""
        # Weak, and looked at: after a reduction that raised, the next one does not get its tensor.
        given = None if self._input is None else self._input()
        if given is None or (given.shape, given.dtype) != (torch.Size(size), dtype):
            given = torch.empty(tuple(size), dtype=dtype, device=device)
            self._input = weakref.ref(given)
            return given
        self._input = None
        if given.is_cuda:
            # FSDP lets go of an input once it has been reduced, but what is added to earlier gradients, or copied to
            # the host, is read on this stream after that.
            given.record_stream(torch.cuda.current_stream(device))
        return given

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: object, **__: object) -> None:
        """Not called by these versions of torch on one rank."""
        output_tensor.copy_(input_tensor)
