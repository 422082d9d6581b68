"""Device memory of NCCL communicators: kept small for a single rank, released in sleep if torch and NCCL support it.

A suspended communicator keeps its connections and its process group, so references to the group stay valid. This needs
torch 2.12 (`Backend.suspend`) and NCCL 2.29.7 or later. Suspend and resume are collective: every rank goes over its
groups in creation order, which is the same on all ranks of a group. Groups without a communicator of all their ranks,
because no collective has run in them yet or ever will (pipeline stages that only send and receive), are left alone.
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
# What torch 2.12 says of a group without a communicator of all its ranks. It has no question for this:
# `_is_initialized` is also true where only pairs of ranks have communicators, which it cannot suspend.
WITHOUT_COMMUNICATOR = "communicator not initialized"


def lone_rank_options(timeout: timedelta) -> Any:
    """`pg_options` for an NCCL group of one rank, which needs only one channel: its communicator then takes 10 MiB on
    an H200 instead of 388 MiB with NCCL's default number of channels."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = 1
    return options


def refusal() -> str:
    """Why communicators cannot be suspended here; "" if they can."""
    kept = "cluster.suspend_communicators: communicators keep their memory during sleep:"
    if not dist.is_nccl_available():
        return f"{kept} torch {torch.__version__} was built without NCCL"
    if not hasattr(torch._C._distributed_c10d.Backend, "suspend"):
        return f"{kept} torch {torch.__version__} cannot suspend them; use 2.12 or later"
    version = tuple(torch.cuda.nccl.version()[:3])
    if version < NCCL:
        return f"{kept} NCCL {'.'.join(map(str, version))} cannot suspend them; use {'.'.join(map(str, NCCL))} or later"
    return ""


@define(eq=False)
class Communicators:
    """The communicators of all process groups on one device."""

    device: torch.device
    library: str = "nccl"
    _suspended: list[Any] = field(factory=list, init=False)

    def suspend(self) -> str:
        """Release their memory until `resume`; no group may be used in between. Called on every rank; idempotent.
        Returns why they cannot be suspended; "" if they can."""
        reason = refusal()
        if not reason and not self._suspended:
            for communicator in self._all():
                try:
                    communicator.suspend()
                except RuntimeError as error:
                    if WITHOUT_COMMUNICATOR not in str(error):
                        raise
                else:
                    self._suspended.append(communicator)
        return reason

    def resume(self) -> None:
        """Undo `suspend`. Called on every rank; does nothing if nothing is suspended."""
        suspended, self._suspended = self._suspended, []
        for communicator in suspended:
            communicator.resume()

    def _all(self) -> Iterator[Any]:
        """All communicators, in creation order; torch has no public list of its groups."""
        for group in distributed_c10d._world.pg_map:
            if self.device.type in {device.type for device in group._device_types}:
                communicator = group._get_backend(torch.device(self.device.type))
                if communicator.name() == self.library:
                    yield communicator
