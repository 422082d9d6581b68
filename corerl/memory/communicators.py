"""The device memory of NCCL's communicators: kept small for a lone rank, given back in sleep where torch and NCCL can.

A suspended communicator keeps its connections and its process group, so all who hold the group find it as it was. torch
has it from 2.12 on (`Backend.suspend`), NCCL from 2.29.7 on. Both ends are collective: every rank goes over its groups
in the order in which they were made, which is the same on all ranks of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch.distributed import distributed_c10d

NCCL = (2, 29, 7)


def lone_rank_options(timeout: timedelta) -> Any:
    """`pg_options` of an NCCL group of one rank. It has nobody to send to, and one channel is enough: its communicator
    then holds 10 MiB of an H200, and 388 MiB with as many channels as NCCL takes by itself."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = 1
    return options


def refusal() -> str:
    """Why no communicator can be suspended here, or nothing."""
    kept = "cluster.suspend_communicators: communicators keep their memory in sleep:"
    if not dist.is_nccl_available():
        return f"{kept} torch {torch.__version__} is without NCCL"
    if not hasattr(torch._C._distributed_c10d.Backend, "suspend"):
        return f"{kept} torch {torch.__version__} cannot suspend them; 2.12 and later can"
    version = tuple(torch.cuda.nccl.version()[:3])
    if version < NCCL:
        return (
            f"{kept} NCCL {'.'.join(map(str, version))} cannot suspend them; {'.'.join(map(str, NCCL))} and later can"
        )
    return ""


@define(eq=False)
class Communicators:
    """The communicators of all process groups on one device."""

    device: torch.device
    library: str = "nccl"
    _suspended: list[Any] = field(factory=list, init=False)

    def suspend(self) -> str:
        """Give their memory back until `resume`; in between no group may be used. Called on every rank; where they are
        suspended already it does nothing. Returns why they cannot be, or nothing."""
        reason = refusal()
        if not reason and not self._suspended:
            for communicator in self._all():
                communicator.suspend()
                self._suspended.append(communicator)
        return reason

    def resume(self) -> None:
        """Called on every rank; where nothing is suspended it does nothing."""
        suspended, self._suspended = self._suspended, []
        for communicator in suspended:
            communicator.resume()

    def _all(self) -> Iterator[Any]:
        """All communicators, in the order of their making; torch has no public list of its groups."""
        for group in distributed_c10d._world.pg_map:
            if self.device.type in {device.type for device in group._device_types}:
                communicator = group._get_backend(torch.device(self.device.type))
                if communicator.name() == self.library:
                    yield communicator
