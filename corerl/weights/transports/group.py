"""A process group for broadcasts over gloo or NCCL in which nobody waits forever for a dead peer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from corerl.errors import WeightUpdateError
from corerl.weights.transport import Address

# Our own timeout must come before NCCL's, which is of no use here.
WATCHDOG_MARGIN = 60.0
# Read by torch when it creates an NCCL group: with "0", the watchdog leaves a failed collective to the waiting thread
# instead of ending the process.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SPIN_SECONDS = 2e-3  # of polling a broadcast without pauses
PAUSE_SECONDS = 5e-4  # between polls after that
ASK_SECONDS = 0.25  # between two checks of `closed`, which may be a round trip to the store
LEAVE_SECONDS = 5.0  # to wait for a group's abort


class BroadcastGroup:
    """The process group of one sender, which is rank 0 in it, and all receivers."""

    def __init__(self, address: Address, *, sender: int, rank: int, closed: Callable[[], str]) -> None:
        """Connect with the other members. Raises like `finish`. `closed` returns why to wait no more, or ""; it is
        called now and then during each wait."""
        self._closed = closed
        self._seconds = address.timeout
        self._timeout = timedelta(seconds=address.timeout)
        self._backend: Any = None
        size = 1 + len(address.engines)
        failed: list[Exception] = []
        device = torch.cuda.current_device() if address.device == "cuda" else None

        def meet() -> None:
            try:
                self._meet(address, sender, rank, size, device)
            except Exception as error:  # raised below, in the waiting thread
                failed.append(error)

        # In a thread, because if a member has died, neither library returns before its own timeout.
        meeting = threading.Thread(target=meet, daemon=True, name="weights: meet")
        meeting.start()
        self._wait(lambda: not meeting.is_alive(), "forming the group")
        if failed:
            raise failed[0]

    def _meet(self, address: Address, sender: int, rank: int, size: int, device: int | None) -> None:
        # Its own connection: while one waits for a key, nobody else can use it.
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=self._timeout)
        prefixed = dist.PrefixStore(f"group/{sender}", behind_token(store, address))
        if device is None:
            self._backend = dist.ProcessGroupGloo(prefixed, rank, size, self._timeout)
            return
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=address.timeout + WATCHDOG_MARGIN)
        with _environment(ERROR_HANDLING, "0"):
            self._backend = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        # NCCL connects at the first collective.
        self._backend.broadcast(torch.zeros(1, dtype=torch.uint8, device="cuda"), 0).wait()
        torch.cuda.current_stream().synchronize()

    def start(self, *tensors: torch.Tensor) -> list[Any]:
        """Start broadcasts from rank 0 to all, in place and in this order; pass the result to `finish`."""
        return [self._backend.broadcast(tensor.view(torch.uint8), 0) for tensor in tensors]

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for broadcasts. Raises the library's error for a lost peer; WeightUpdateError if the address is closed,
        or the time is up."""
        for work in works:
            self._wait(work.is_completed, "a broadcast")
            work.wait(self._timeout)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        started = asked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - asked > ASK_SECONDS:
                asked = now
                if reason := self._closed():
                    raise WeightUpdateError(reason)
            if now - started > self._seconds:
                raise WeightUpdateError(f"{what} did not finish within {self._seconds:g} s")
            if now - started > SPIN_SECONDS:
                time.sleep(PAUSE_SECONDS)

    def abort(self) -> None:
        """Leave without notice; the others' next broadcast fails."""
        backend, self._backend = self._backend, None
        leaving = threading.Thread(target=_abort, args=(backend,), daemon=True, name="weights: leave")
        del backend  # gloo's destructor waits for its operations: let only that thread hold it
        leaving.start()
        leaving.join(LEAVE_SECONDS)


def behind_token(store: dist.Store, address: Address) -> dist.Store:
    """The part of a store whose keys begin with the address's token: who does not know it reads and writes others."""
    return dist.PrefixStore(address.token, store)


def _abort(backend: Any) -> None:
    if backend is not None:
        backend.abort()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
