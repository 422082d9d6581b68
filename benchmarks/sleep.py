"""Measure sleep and wake-up of a slice of 8B training state on one GPU, against a bare loop over the same storages.

python -m benchmarks.sleep --output found/sleep.json
python -m benchmarks.sleep --tiny

15 layers of the Qwen3-8B shape have 4.1 B parameters: 50 GB of float32 weights and moments. Both sides move the same
storages in turns, so the sizes are equal, and every bit is compared at the end of each round. Needs a GPU of its own
with 60 GiB, and twice the state in host memory, since the bare loop has its own pinned memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attrs import define, evolve, field
from torch import Tensor

from benchmarks.report import Comparison, Number, Report, finish, in_turns
from benchmarks.steps import GIB, QWEN3_8B, TINY, QuickWeights
from corerl.backend.primitives import StateKey
from corerl.config.schema import TrainConfig
from corerl.memory.storage import resident_bytes
from corerl.trainer.worker import Worker
from corerl.types import MemoryKind, SleepResult
from corerl.weights.chunks import Chunk
from corerl_testing.harness import Setup, make_worker

LOOP = 0.97  # of the bare loop's speed
TO_HOST, BACK = 0.9, 0.85  # of the bandwidth of one large copy
ALLOWED = 0.5  # GiB beside the context
KINDS = frozenset(MemoryKind)
RAW = 4 * GIB  # bytes of one large copy


class BareLoop:
    """Tensor by tensor to one pinned buffer and back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        rooms = [-(-tensor.nbytes // 512) * 512 for tensor in tensors]
        self._buffer = pinned(sum(rooms), tensors[0].device)
        parts = self._buffer.split(rooms)
        self._views = [part[: each.nbytes].view(each.dtype) for part, each in zip(parts, tensors, strict=True)]

    def sleep(self) -> None:
        for tensor, view in zip(self._tensors, self._views, strict=True):
            view.copy_(tensor.view(-1), non_blocking=True)
        synchronize(self._buffer.device)
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        for tensor, view in zip(self._tensors, self._views, strict=True):
            tensor.untyped_storage().resize_(view.nbytes)
            tensor.view(-1).copy_(view, non_blocking=True)


def pinned(nbytes: int, device: torch.device) -> Tensor:
    """[nbytes] uint8; its pages are touched by threads, which is several times as fast as to ask for pinned memory."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if device.type == "cpu":
        return memory
    parts = memory.chunk(16)
    threads = [threading.Thread(target=part[::4096].fill_, args=(0,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)))
    return memory


@define(kw_only=True)
class Found:
    """Seconds and bytes, written to the file again after every piece of the work."""

    size: str
    output: str | None
    nbytes: int = 0
    numbers: list[Number] = field(factory=list)
    ours: tuple[list[float], list[float]] = ([], [])  # asleep, awake again
    other: tuple[list[float], list[float]] = ([], [])
    raw: tuple[list[float], list[float]] = ([], [])  # of as many bytes in one large copy after another

    def add(self, what: str, value: float, unit: str, target: float | None = None) -> None:
        self.numbers.append(Number(what=what, values=[value], unit=unit, target=target))
        self.write()

    @property
    def report(self) -> Report:
        comparisons = []
        for index, (what, share) in enumerate((("sleep", TO_HOST), ("wake-up", BACK))):
            ours, other, raw = self.ours[index], self.other[index], self.raw[index]
            if ours and other:
                bare = "a bare loop over the same storages"
                comparisons.append(pair(what, bare, ours, other, target=round(1 / LOOP, 3)))
            if ours and raw:
                copies = f"as many bytes in raw pinned copies, {self.nbytes / statistics.median(raw) / 1e9:.1f} GB/s"
                comparisons.append(pair(what, copies, ours, raw * len(ours), target=round(1 / share, 3)))
        return Report(name="sleep", size=self.size, comparisons=comparisons, numbers=self.numbers, note=NOTE)

    def write(self) -> None:
        if self.output:
            finish(self.report, self.output)


NOTE = (
    "CoreRL's side is the FSDP backend's hooks `sleep` and `wake_up` through the worker, with all kinds, including "
    "freeing, emptying torch's cache and reading the driver's count. The bare loop also frees memory and empties the "
    "cache, but counts nothing. Bits are compared after each side's turn, outside of the timing."
)


def pair(what: str, against: str, ours: Sequence[float], other: Sequence[float], *, target: float) -> Comparison:
    rounds = min(len(ours), len(other))
    return Comparison(what=what, against=against, ours=ours[:rounds], other=other[:rounds], target=target)


def measure(*, layers: int, rounds: int, tiny: bool, output: str | None = None) -> Report:
    """In a process that has touched no device yet."""
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    fields = fields_of(layers=layers, tiny=tiny)
    found = Found(size=f"{fields['num_hidden_layers']} layers of hidden {fields['hidden_size']}", output=output)
    synchronize(device)
    context = used(device)
    found.add("the CUDA context", context / GIB, "GiB")

    began = time.perf_counter()
    worker = begin(fields, device)
    found.add("init, with host memory being pinned in the background", time.perf_counter() - began, "s")
    worker.backend.local_state(StateKey.EXP_AVG)  # moments, as the first step makes them
    tensors = [each for kind in MemoryKind for each in worker.backend.on_device(kind) if each.ndim]
    found.nbytes = resident_bytes(tensors)
    found.size += f": {found.nbytes / 1e9:.1f} GB in {len(tensors)} tensors"
    first, again = timed(device, lambda: worker.sleep(KINDS)), timed(device, lambda: worker.wake_up(KINDS))
    found.add("the first sleep, right after, with what is left of pinning", first, "s")
    found.add("and wake-up", again, "s")

    one = raw_seconds(device, RAW if device.type == "cuda" else 2**20)
    for into, per_byte in zip(found.raw, one, strict=True):
        into.append(per_byte * found.nbytes)
    began = time.perf_counter()
    loop = BareLoop(tensors)
    found.add("pinning the bare loop's buffer", time.perf_counter() - began, "s")
    sums = bits(tensors)
    slept: list[SleepResult] = []
    left: list[int] = []  # bytes in use on the device while asleep

    def ours(_: int) -> float:
        found.ours[0].append(timed(device, lambda: slept.append(worker.sleep(KINDS))))
        left.append(used(device))
        found.ours[1].append(timed(device, lambda: worker.wake_up(KINDS)))
        return compared(tensors, sums, "CoreRL")

    def other(_: int) -> float:
        found.other[0].append(timed(device, loop.sleep))
        found.other[1].append(timed(device, loop.wake_up))
        found.write()
        return compared(tensors, sums, "the bare loop")

    in_turns(rounds, ours, other)
    asleep = max(left) - context
    found.add("left on the device, asleep, beside the context", asleep / GIB, "GiB", None if tiny else ALLOWED)
    found.add("left by CoreRL's own count, which on a GPU has the context in it", slept[-1].residual_bytes / GIB, "GiB")
    found.add("by how much the driver's count fell", slept[-1].driver_freed_bytes / GIB, "GiB")
    for index, what in enumerate(("to host", "back")):
        for who, took in (("CoreRL", found.ours), ("the bare loop", found.other), ("raw copies", found.raw)):
            found.add(f"{what}, {who}", found.nbytes / statistics.median(took[index]) / 1e9, "GB/s")
    for note in {note for each in slept for note in each.notes}:
        print(note)
    worker.shutdown("measured")
    return found.report


def fields_of(*, layers: int, tiny: bool) -> dict[str, Any]:
    """Of the model's config."""
    return {**QWEN3_8B, **(TINY if tiny else {"num_hidden_layers": layers})}


def begin(fields: dict[str, Any], device: torch.device) -> Worker:
    """A worker of the FSDP backend, as in a run whose ranks sleep."""
    setup = Setup(
        backend="fsdp",
        model="",
        fields=fields,
        train=TrainConfig(precision="float32" if device.type == "cpu" else "bfloat16"),
        device=device.type,
    )
    worker = make_worker(setup)
    worker.config = evolve(worker.config, sleeps=tuple(kind.value for kind in MemoryKind))

    def weights(chunks: Sequence[Chunk]) -> QuickWeights:
        return QuickWeights({chunk.name: chunk.shape for chunk in chunks}, device)

    with mock.patch.object(worker.backend, "initial_weights", weights):
        worker.init("127.0.0.1", 0)
    return worker


def raw_seconds(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Per byte, to host and back: the best of four of one large copy each way."""
    host, there = pinned(nbytes, device), torch.empty(nbytes, dtype=torch.uint8, device=device)
    copies = (lambda: host.copy_(there, non_blocking=True), lambda: there.copy_(host, non_blocking=True))
    to_host, back = (min(timed(device, copy) for _ in range(4)) / nbytes for copy in copies)
    if device.type == "cuda":
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())))
    return to_host, back


def bits(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor the sum of its words."""
    return [int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors]


def compared(tensors: Sequence[Tensor], wanted: Sequence[int], who: str) -> float:
    if bits(tensors) != list(wanted):
        raise AssertionError(f"{who} did not restore every bit; its seconds say nothing")
    return 0.0


def timed(device: torch.device, call: Callable[[], object]) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def used(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=15, help="of the 8B shape; 12 bytes a parameter (default: 15)")
    parser.add_argument("--rounds", type=int, default=5, help="of each side, in turns (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything runs")
    parser.add_argument("--output", help="a JSON file, written again after each piece; without it a table is printed")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    report = measure(layers=args.layers, rounds=args.rounds, tiny=args.tiny, output=args.output)
    finish(report, None)


if __name__ == "__main__":
    main()
