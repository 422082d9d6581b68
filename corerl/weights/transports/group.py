"""A process group that broadcasts, over gloo or NCCL, in which nobody waits for ever for a peer that is gone."""

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

# Waiting gives up before NCCL's own timeout, which is of no use here.
WATCHDOG_MARGIN = 60.0
# What torch reads when a group of NCCL's is made: with "0" its watchdog leaves a failed collective to whoever waits for
# it, and does not end the process.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SPIN_SECONDS = 2e-3  # in which a broadcast is looked at without a pause
PAUSE_SECONDS = 5e-4  # between two looks after that
LEAVE_SECONDS = 5.0  # that the end of a group is waited for


class BroadcastGroup:
    """The process group of one sender, rank 0 in it, and one set of engines."""

    def __init__(self, address: Address, *, name: str, rank: int, size: int, broken: Callable[[], str]) -> None:
        """Meets the other members. Raises as `finish` does."""
        self._name = name
        self._seconds = address.timeout
        self._timeout = timedelta(seconds=address.timeout)
        self._backend: Any = None
        failed: list[Exception] = []
        device = torch.cuda.current_device() if address.device == "cuda" else None

        def meet() -> None:
            try:
                self._meet(address, rank, size, device)
            except Exception as error:  # raised below, in the thread that waits
                failed.append(error)

        # In a thread: where a member has died, neither library comes back from here before a timeout of its own.
        meeting = threading.Thread(target=meet, daemon=True, name="weights: meet")
        meeting.start()
        self._wait(lambda: not meeting.is_alive(), broken, "meet")
        if failed:
            raise failed[0]

    def _meet(self, address: Address, rank: int, size: int, device: int | None) -> None:
        # A connection of its own: while one waits for a key, nobody else can ask through it.
        store = dist.TCPStore(address.host, address.port, is_master=False, timeout=self._timeout)
        prefixed = dist.PrefixStore(f"group/{self._name}", store)
        if device is None:
            self._backend = dist.ProcessGroupGloo(prefixed, rank, size, self._timeout)
            return
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=address.timeout + WATCHDOG_MARGIN)
        with _environment(ERROR_HANDLING, "0"):
            self._backend = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        # NCCL connects with the first collective.
        self._backend.broadcast(torch.zeros(1, dtype=torch.uint8, device="cuda"), 0).wait()
        torch.cuda.current_stream().synchronize()

    def start(self, *tensors: torch.Tensor) -> list[Any]:
        """Broadcasts from rank 0 to all, in place and in this order; to `finish`."""
        return [self._backend.broadcast(tensor.view(torch.uint8), 0) for tensor in tensors]

    def finish(self, works: Sequence[Any], broken: Callable[[], str]) -> None:
        """Raises what the library raises of a lost peer, and WeightUpdateError once `broken`, which is asked all the
        while, has an answer, or the time is up."""
        for work in works:
            self._wait(work.is_completed, broken, "broadcast")
            work.wait(self._timeout)

    def _wait(self, done: Callable[[], bool], broken: Callable[[], str], what: str) -> None:
        began = time.monotonic()
        while not done():
            waited = time.monotonic() - began
            if waited > SPIN_SECONDS:
                if reason := broken():
                    raise WeightUpdateError(reason)
                if waited > self._seconds:
                    raise WeightUpdateError(f"{what}: not done within {self._seconds:g} s")
                time.sleep(PAUSE_SECONDS)

    def abort(self) -> None:
        """Leave without a word to the others, whose next broadcast fails."""
        backend, self._backend = self._backend, None
        leaving = threading.Thread(target=_abort, args=(backend,), daemon=True, name="weights: leave")
        del backend  # gloo's end waits for what is under way in it: in that thread alone
        leaving.start()
        leaving.join(LEAVE_SECONDS)


def _abort(backend: Any) -> None:
    if backend is not None:
        backend.abort()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable of this process, for the moment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
