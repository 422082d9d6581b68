"""Run the ranks of a test in this process, or in processes that live for a whole test run, since starting torch is what
makes distributed tests slow.

    pool = RankPool(2)
    results = pool.run(function, *args)     # function(*args) on every rank, results in rank order
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar
from unittest import mock

T = TypeVar("T")

TIMEOUT_SECONDS = 240.0  # against hangs; no test should come close
# Imported once, before processes are forked; together they import everything that a rank needs except its backend.
PRELOAD = ["corerl_testing.scenarios.states", "corerl_testing.scenarios.training"]


# Errors that a backend raises before its ranks communicate, as tracebacks end.
REFUSALS = ("corerl.errors.Unsupported: ", "corerl.errors.ModelError: ")
REFUSAL_SECONDS = 2.0  # how long to wait for each other rank to refuse too, or to end
LOST = " by peer"  # what gloo says of a connection that was closed or reset


SIGNALS = {signal.SIGKILL: "from outside, or for want of memory", signal.SIGTERM: "from outside"}


def fork_server() -> Any:
    """A fork server with PRELOAD imported. It starts with its first process; preloads set after that are silently
    ignored."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


forks: Callable[[], Any] = fork_server  # gives the context of multiprocessing that ranks on a CPU are forked in


class RankFailed(Exception):
    """A rank raised, died, or did not answer; the message includes its traceback."""


class Ranks(Protocol):
    """Processes in one gloo group that run functions."""

    world_size: int

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(*args)` on every rank, with torch.distributed initialized; returns results in rank order."""


class OneRank:
    """This process as the only rank, in a group that lasts for one `run`."""

    world_size = 1

    def __init__(self) -> None:
        self._modules = 0

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return [function(*args)]
        finally:
            dist.destroy_process_group()
            self._modules = _pass_over_modules(self._modules)


class RankPool:
    """`world_size` processes in one gloo group, started by the first `run`. A failure ends them all, unless every rank
    refused the request; the next `run` starts new ones."""

    def __init__(self, world_size: int, device: str = "cpu", environment: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self.device = device  # cpu, or cuda with one GPU per rank
        self._environment = environment or {}  # variables added to those of this process
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None  # where the ranks meet

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """`function` must be importable by name. Raises RankFailed with the traceback of the rank that raised first,
        without waiting for the other ranks."""
        try:
            if not self._processes:
                self._start()
            return self._run(function, args)
        except RankFailed:
            raise  # ranks that all refused have answered, and live on
        except BaseException:  # a test's timeout, Ctrl-C: else the next call would get the answers to this one
            self.close()
            raise

    def _run(self, function: Callable[..., T], args: Sequence[Any]) -> list[T]:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, args))
            except OSError:
                self.close()
                raise RankFailed(f"{function.__qualname__}: rank {rank} had already died") from None
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(results) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in results]
            ready = wait([self._pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankFailed(
                    f"{function.__qualname__}: ranks {waiting} did not answer within {TIMEOUT_SECONDS:.0f} s"
                )
            for rank in waiting:
                if self._pipes[rank] in ready:
                    results[rank] = self._receive(rank, function.__qualname__)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End all ranks by SIGKILL, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # A forked library would not read its variables again, and CUDA does not survive a fork: libraries that are
        # preloaded may initialize it, so that those of a CPU do not see it.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        forked = self.device == "cpu" and not self._environment
        context: Any = forks() if forked else multiprocessing.get_context("spawn")
        # It listens before any rank is started, so no other process can take the port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, self._store.port, self.device, theirs), daemon=True
            )
            with mock.patch.dict(os.environ, {**hidden, **self._environment}):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _receive(self, rank: int, function: str) -> Any:
        try:
            ok, value = self._pipes[rank].recv()
        except (EOFError, OSError):
            ended = self._end_of(rank)
            self.close()
            raise RankFailed(f"{function}: rank {rank} died{ended}") from None
        if not ok:
            if not self._all_refuse(rank, value):
                # One that has lost its connection to another may say so before that one's end is seen here.
                patience = REFUSAL_SECONDS if LOST in value else 0.0
                others = [other for other in range(self.world_size) if other != rank]
                dead = next((other for other in others if self._ended(other, patience)), None)
                ended = "" if dead is None else self._end_of(dead)
                self.close()
                if dead is not None:  # what the others raise is that they have lost it
                    raise RankFailed(f"{function}: rank {dead} died{ended}")
            summary = (value.strip().splitlines() or ["an error"])[-1]  # first, where a summary shows it
            raise RankFailed(f"{function}: rank {rank} raised {summary}\n{value}")
        return value

    def _ended(self, rank: int, patience: float) -> bool:
        """Whether the rank's process ends within so many seconds; takes an answer that it has given for good."""
        try:
            if self._pipes[rank].poll(patience):
                self._pipes[rank].recv()
        except (EOFError, OSError):
            return True
        return False

    def _end_of(self, rank: int) -> str:
        """How a process that has closed its pipe ended, if that is known soon."""
        process = self._processes[rank]
        process.join(REFUSAL_SECONDS)
        code = process.exitcode
        if code is None:
            return ""
        if code >= 0:
            return f" with exit code {code}, without an exception; something calls os._exit or sys.exit"
        return f" of {signal.Signals(-code).name}, without an exception: {SIGNALS.get(-code, 'a crash in a library')}"

    def _all_refuse(self, first: int, text: str) -> bool:
        """Whether every rank refuses, so that none waits for another; rank `first` has answered with `text`."""
        for rank, pipe in enumerate(self._pipes):
            answer = (False, text)
            if rank != first:
                if not pipe.poll(REFUSAL_SECONDS):
                    return False
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    return False
            ok, said = answer
            if ok or not any(refusal in said for refusal in REFUSALS):
                return False
        return True


def _serve(rank: int, world_size: int, port: int, device: str, pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    modules = 0
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return  # the test run is over
        try:
            pipe.send((True, function(*args)))
        except Exception:  # also if the result cannot be pickled
            pipe.send((False, traceback.format_exc()))
        modules = _pass_over_modules(modules)


def _pass_over_modules(known: int) -> int:
    """Returns the number of imported modules; if it is above `known`, excludes all current objects from garbage
    collection. Walking a million objects takes longer than most checks, and some libraries collect for every model.
    """
    if len(sys.modules) > known:
        gc.collect()
        gc.freeze()
    return len(sys.modules)
