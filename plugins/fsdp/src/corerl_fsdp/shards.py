"""A rank's shards as plain parameters, so that the optimizer works on them without DTensor's overhead."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from corerl.backend import step_scaled


class LocalShards:
    """The local shards, and the parameters that the optimizer steps.

    `local[name]` shares its storage with the shard of the DTensor of that name. `params[name]`, for those that are
    `trained`, is what the optimizer steps: the same memory or, with `on_host`, a host copy that is refreshed before a
    step and copied back after it, so that the shard is always authoritative. AdamW is element-wise, so stepping the
    shards equals stepping the whole; plain tensors avoid an overhead that is noticeable in small models.
    """

    def __init__(self, module: nn.Module, trained: Collection[str], *, on_host: bool) -> None:
        self.dtensors: dict[str, DTensor] = {}
        for name, param in module.named_parameters():
            assert isinstance(param, DTensor)
            self.dtensors[name] = param
        self.local = {name: param.to_local().detach() for name, param in self.dtensors.items()}
        own = {name: self.local[name] for name in trained}
        stepped = {name: host_like(shard) for name, shard in own.items()} if on_host else own
        self.params = {name: nn.Parameter(tensor) for name, tensor in stepped.items()}
        self._host_grads = {name: host_like(shard) for name, shard in own.items()} if on_host else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the full parameters that are stepped."""
        return {name: tuple(self.dtensors[name].shape) for name in self.params}

    @property
    def trained(self) -> list[DTensor]:
        return [self.dtensors[name] for name in self.params]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.AdamW, factor: float) -> None:
        """Step the optimizer over `params`, with the DTensors' gradients times `factor`."""
        for name in self.params:
            grad = self.dtensors[name].grad
            assert grad is None or isinstance(grad, DTensor)
            local = None if grad is None else grad.to_local()
            if self._host_grads is not None:
                self.params[name].copy_(self.local[name], non_blocking=True)
                local = None if local is None else self._host_grads[name].copy_(local, non_blocking=True)
            self.params[name].grad = local
        if self._host_grads is not None and any(shard.is_cuda for shard in self.local.values()):
            torch.cuda.synchronize()
        step_scaled(optimizer, factor)
        if self._host_grads is not None:
            for name, param in self.params.items():
                self.local[name].copy_(param)  # blocking, since the next step overwrites these host buffers

    def drop_grads(self) -> None:
        for name, param in self.params.items():
            self.dtensors[name].grad = param.grad = None


def host_like(tensor: Tensor) -> Tensor:
    """Uninitialized host memory like `tensor`; pinned for a GPU tensor, so that copies are asynchronous."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
