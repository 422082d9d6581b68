"""A rank's shards as plain parameters: the optimizer works on these, without DTensor between it and the memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LocalShards:
    """`local[name]` shares its storage with the shard of the DTensor of that name; `params[name]` is what the optimizer
    steps: the same memory again, or with `on_host` a copy of it in host memory, which is brought up to date before a
    step and copied back after it, so that the shard is always what counts.

    AdamW is element-wise, so stepping the shards is stepping the whole; and work on a tensor costs what it costs in
    plain torch, which small models notice.
    """

    def __init__(self, module: nn.Module, *, on_host: bool) -> None:
        self.dtensors: dict[str, DTensor] = {}
        for name, param in module.named_parameters():
            assert isinstance(param, DTensor)
            self.dtensors[name] = param
        self.local = {name: param.to_local().detach() for name, param in self.dtensors.items()}
        stepped = {name: host_like(shard) for name, shard in self.local.items()} if on_host else self.local
        self.params = {name: nn.Parameter(tensor) for name, tensor in stepped.items()}
        self._host_grads = {name: host_like(shard) for name, shard in self.local.items()} if on_host else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole parameters."""
        return {name: tuple(param.shape) for name, param in self.dtensors.items()}

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimizer over `params`, with the DTensors' gradients."""
        for name, dtensor in self.dtensors.items():
            grad = dtensor.grad
            assert grad is None or isinstance(grad, DTensor)
            local = None if grad is None else grad.to_local()
            if self._host_grads is not None:
                self.params[name].copy_(self.local[name], non_blocking=True)
                local = None if local is None else self._host_grads[name].copy_(local, non_blocking=True)
            self.params[name].grad = local
        if self._host_grads is not None and any(shard.is_cuda for shard in self.local.values()):
            torch.cuda.synchronize()
        optimizer.step()
        if self._host_grads is not None:
            for name, shard in self.local.items():
                shard.copy_(self.params[name])  # blocks: the next step writes to these host buffers again

    def drop_grads(self) -> None:
        for name, dtensor in self.dtensors.items():
            dtensor.grad = None
            self.params[name].grad = None


def host_like(tensor: Tensor) -> Tensor:
    """Uninitialised memory of the host, which copies to and from a GPU do not wait for."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
