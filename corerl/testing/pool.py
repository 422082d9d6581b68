"""Rank processes that live for a whole test run: starting torch is what makes distributed tests slow, so do it once.

    pool = RankPool(2)
    results = pool.run("package.module:function", *args)     # function(*args) on every rank, results in rank order
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_SECONDS = 240.0  # against hangs; no test should come near it


class RankFailed(Exception):
    """A rank raised, died, or did not answer; holds its traceback as text."""


class RankPool:
    """`world_size` processes in one gloo group. A failure ends them; the next `run` starts new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: str, *args: Any) -> list[Any]:
        """Call "module:function" with picklable `args` on all ranks. Raises RankFailed with the first rank's traceback."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(results) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in results]
            ready = multiprocessing.connection.wait(
                [self._pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                self.close()
                raise RankFailed(f"{function}: ranks {waiting} did not answer within {TIMEOUT_SECONDS:.0f} s")
            for rank in waiting:
                if self._pipes[rank] in ready:
                    results[rank] = self._receive(rank, function)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _receive(self, rank: int, function: str) -> Any:
        try:
            ok, value = self._pipes[rank].recv()
        except EOFError:
            self.close()
            raise RankFailed(f"{function}: rank {rank} died") from None
        if not ok:
            self.close()
            raise RankFailed(f"{function}: rank {rank} raised\n{value}")
        return value


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return  # the test run is over
        module, _, name = function.partition(":")
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
