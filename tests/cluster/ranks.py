"""Ranks that meet over gloo, and of which one is held up until someone opens its gate, a FIFO, for writing."""

from __future__ import annotations

import os
from datetime import timedelta

import ray
import torch
import torch.distributed as dist

from tests.cluster.members import listening

RAYS_OWN = "::"  # on all interfaces, but with a token


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.phase = "start"

    def node(self) -> str:
        """The id of the Ray node that it is on."""
        name: str = ray.get_runtime_context().get_node_id()
        return name

    def hosts(self) -> list[str]:
        """The addresses on which it listens."""
        return sorted({host for host, _ in listening()})

    def interface(self) -> str:
        """Over which gloo talks."""
        return os.environ["GLOO_SOCKET_IFNAME"]

    def init(self, host: str, port: int, listening: int | None, gate: str) -> None:
        """Meet, build a model, and load."""
        self.phase = "process group"
        timeout = timedelta(seconds=60.0)  # against hangs
        store = dist.TCPStore(
            host,
            port,
            world_size=self.size,
            is_master=self.rank == 0,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening,
        )
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self.phase = "model build"
        hold(gate)
        self.phase = "load"
        dist.barrier()
        self.phase = ""

    def train(self, gate: str) -> float:
        """The sum of all ranks' numbers, counted from 1, by one all-reduce."""
        hold(gate)
        total = torch.tensor([self.rank + 1.0])
        dist.all_reduce(total)
        return float(total)

    def pairs(self, gate: str) -> float:
        """The same of four ranks in two pairs that then meet across, so that each waits for its own partner first."""
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        hold(gate)
        total = torch.tensor([self.rank + 1.0])
        for group in groups:
            if dist.get_rank(group) >= 0:
                dist.all_reduce(total, group=group)
        return float(total)


def hold(gate: str) -> None:
    if gate:
        with open(gate) as reader:
            reader.read()
