"""A rank's shards as plain parameters: the optimizer works on these, without DTensor between it and the memory."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor


class LocalShards:
    """`params[name]` is a plain parameter that shares its storage with the shard of the DTensor of that name.

    AdamW is element-wise, so stepping the shards is stepping the whole; and work on a tensor costs what it costs in
    plain torch, which small models notice.
    """

    def __init__(self, module: nn.Module) -> None:
        self.dtensors: dict[str, DTensor] = {}
        self.params: dict[str, nn.Parameter] = {}
        for name, param in module.named_parameters():
            assert isinstance(param, DTensor)
            self.dtensors[name] = param
            self.params[name] = nn.Parameter(param.to_local().detach())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole parameters."""
        return {name: tuple(param.shape) for name, param in self.dtensors.items()}

    def take_grads(self) -> None:
        """Point each plain parameter at its DTensor's gradient."""
        for name, dtensor in self.dtensors.items():
            grad = dtensor.grad
            assert grad is None or isinstance(grad, DTensor)
            self.params[name].grad = None if grad is None else grad.to_local()

    def drop_grads(self) -> None:
        for name, dtensor in self.dtensors.items():
            dtensor.grad = None
            self.params[name].grad = None
