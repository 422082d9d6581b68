"""Measure sleep and wake-up of a slice of 8B training state on one GPU, against a bare loop over the same storages.

python -m benchmarks.sleep --output found/sleep.json
python -m benchmarks.sleep --tiny

15 layers of the Qwen3-8B shape have 4.1 B parameters: 50 GB of float32 weights and moments. Both sides move the same
storages in turns, so the sizes are equal, and every bit is compared at the end of each round. Needs a GPU of its own
with 60 GiB, and twice the state in host memory, since the bare loop has its own pinned memory.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Comparison, Number, Report, arguments, finish, in_turns
from benchmarks.shapes import QWEN3_8B, tiny_shape
from benchmarks.steps import GIB, quick_worker, synchronize, timed, used
from corerl.backend.primitives import StateKey
from corerl.config.schema import TrainConfig
from corerl.memory.storage import resident_bytes
from corerl.trainer.worker import Worker
from corerl.types import MemoryKind, SleepResult
from corerl_testing.harness import Setup

LOOP = 0.97  # of the bare loop's speed
TO_HOST, BACK = 0.9, 0.85  # of the bandwidth of one large copy
ALLOWED = 0.5  # GiB besides the context
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


NOTE = (
    "CoreRL's side is the FSDP backend's hooks `sleep` and `wake_up` through the worker, with all kinds, including "
    "freeing, emptying torch's cache and reading the driver's count. The bare loop also frees memory and empties the "
    "cache, but counts nothing. Bits are compared after each side's turn, outside of the timing."
)


def measure(*, layers: int, rounds: int, tiny: bool) -> Report:
    """In a process that has touched no device yet."""
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    fields = tiny_shape(QWEN3_8B) if tiny else {**QWEN3_8B, "num_hidden_layers": layers}
    numbers: list[Number] = []

    def number(what: str, value: float, unit: str, target: float | None = None) -> None:
        numbers.append(Number(what=what, values=[value], unit=unit, target=target))
        print(f"{what}: {value:.3g} {unit}", flush=True)  # a command that is cut off leaves what it found

    synchronize(device)
    context = used(device)
    number("the CUDA context", context / GIB, "GiB")
    began = time.perf_counter()
    worker = begin(fields, device)
    number("init, with host memory being pinned in the background", time.perf_counter() - began, "s")
    worker.backend.local_state(StateKey.EXP_AVG)  # moments, as the first step makes them
    tensors = [each for kind in MemoryKind for each in worker.backend.on_device(kind) if each.ndim]
    nbytes = resident_bytes(tensors)
    first, again = timed(device, lambda: worker.sleep(KINDS)), timed(device, lambda: worker.wake_up(KINDS))
    number("the first sleep, right after, with what is left of pinning", first, "s")
    number("and wake-up", again, "s")
    raw = [each * nbytes for each in raw_seconds(device, RAW if device.type == "cuda" else 2**20)]
    began = time.perf_counter()
    loop = BareLoop(tensors)
    number("pinning the bare loop's buffer", time.perf_counter() - began, "s")
    sums = bits(tensors)
    took: dict[str, tuple[list[float], list[float]]] = {"CoreRL": ([], []), "the bare loop": ([], [])}
    slept: list[SleepResult] = []
    left: list[int] = []  # bytes in use on the device while asleep

    def ours(_: int) -> float:
        took["CoreRL"][0].append(timed(device, lambda: slept.append(worker.sleep(KINDS))))
        left.append(used(device))
        took["CoreRL"][1].append(timed(device, lambda: worker.wake_up(KINDS)))
        return compared(tensors, sums, "CoreRL")

    def other(_: int) -> float:
        took["the bare loop"][0].append(timed(device, loop.sleep))
        took["the bare loop"][1].append(timed(device, loop.wake_up))
        return compared(tensors, sums, "the bare loop")

    in_turns(rounds, ours, other)
    target = None if tiny else ALLOWED
    number("left on the device, asleep, besides the context", (max(left) - context) / GIB, "GiB", target)
    number("left by CoreRL's own count, which on a GPU has the context in it", slept[-1].residual_bytes / GIB, "GiB")
    number("by how much the driver's count fell", slept[-1].driver_freed_bytes / GIB, "GiB")
    comparisons = []
    for at, what, share in ((0, "sleep", TO_HOST), (1, "wake-up", BACK)):
        mine, bare = took["CoreRL"][at], took["the bare loop"][at]
        for against, others, bound in (
            ("a bare loop over the same storages", bare, LOOP),
            (f"as many bytes in raw pinned copies, {nbytes / raw[at] / 1e9:.1f} GB/s", [raw[at]] * rounds, share),
        ):
            ratio = round(1 / bound, 3)
            comparisons.append(Comparison(what=what, against=against, ours=mine, other=others, target=ratio))
        for who, seconds in (*((who, each[at]) for who, each in took.items()), ("raw copies", raw[at : at + 1])):
            number(f"{what}, {who}", nbytes / statistics.median(seconds) / 1e9, "GB/s")
    for note in {note for each in slept for note in each.notes}:
        print(note)
    worker.shutdown("measured")
    size = f"{fields['num_hidden_layers']} layers of hidden {fields['hidden_size']}: {nbytes / 1e9:.1f} GB in "
    return Report(
        name="sleep", size=f"{size}{len(tensors)} tensors", comparisons=comparisons, numbers=numbers, note=NOTE
    )


def begin(fields: Mapping[str, Any], device: torch.device) -> Worker:
    """A worker of the FSDP backend, as in a run whose ranks sleep."""
    setup = Setup(
        backend="fsdp",
        model="",
        fields=fields,
        train=TrainConfig(precision="float32" if device.type == "cpu" else "bfloat16"),
        device=device.type,
    )
    return quick_worker(setup, sleeps=tuple(kind.value for kind in MemoryKind))


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


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--layers", type=int, default=15, help="of the 8B shape; 12 bytes a parameter (default: 15)")
    args = parser.parse_args()
    finish(measure(layers=args.layers, rounds=args.rounds, tiny=args.tiny), args.output)


if __name__ == "__main__":
    main()
