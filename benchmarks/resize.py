"""Measure how ranks hand their state to others, `corerl.weights.handover`, against copying the same bytes once.

Two processes hold a model's masters and moments, each half of the rows of every tensor, as FSDP does; one other takes
all of it. Bare is the same process copying as many bytes from its memory to its memory, tensor by tensor. Seconds are
of the taker, from its first request to its last byte; how long processes take to start is not part of them.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.report import Comparison, Number, Report, finish, parser
from corerl.weights.chunks import Chunk
from corerl.weights.handover import Handover, Taken, give

GIVERS = 2
KINDS = ("master", "exp_avg", "exp_avg_sq")
ROWS, COLUMNS = 4096, 1024  # of a tensor: 16 MiB


def chunks(tensors: int, first: int, last: int, value: float) -> list[Chunk]:
    """Rows [first, last) of each tensor."""
    return [
        Chunk(
            f"layers.{index}.weight",
            (ROWS, COLUMNS),
            (first, 0),
            (last - first, COLUMNS),
            torch.full((last - first, COLUMNS), value),
        )
        for index in range(tensors)
    ]


def giving(rank: int, tensors: int, handovers: Sequence[Handover]) -> None:
    torch.set_num_threads(1)
    half = ROWS // GIVERS
    state = {kind: chunks(tensors, rank * half, (rank + 1) * half, float(rank + 1)) for kind in KINDS}
    for handover in handovers:
        give(handover, rank, state, "")


def taking(tensors: int, handovers: Sequence[Handover], results: Any) -> None:
    torch.set_num_threads(1)
    state = {kind: chunks(tensors, 0, ROWS, 0.0) for kind in KINDS}
    source = {kind: chunks(tensors, 0, ROWS, 3.0) for kind in KINDS}
    for handover in handovers:
        taken = Taken(handover, 0)  # waits for the givers
        began = time.perf_counter()
        for kind in taken.kinds:
            taken.take(kind, state[kind])
        taken.close()
        ours = time.perf_counter() - began
        for kind in KINDS:
            for each in state[kind]:
                assert each.view[0, 0] == 1.0 and each.view[-1, -1] == float(GIVERS)
        began = time.perf_counter()
        for kind in KINDS:
            for into, each in zip(state[kind], source[kind], strict=True):
                into.view.copy_(each.view)
        results.put((ours, time.perf_counter() - began))


def measure(*, rounds: int, size: int) -> Report:
    """`size` is MiB of each kind of state."""
    tensors = max(1, size * 2**20 // (ROWS * COLUMNS * 4))
    handovers = []
    listening = []
    for number in range(rounds + 1):
        each = socket.create_server(("127.0.0.1", 0))
        listening.append(each)
        handovers.append(
            Handover(
                host="127.0.0.1",
                port=each.getsockname()[1],
                token=f"round {number}",
                givers=GIVERS,
                takers=1,
            )
        )
    for each in listening:
        each.close()
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    processes = [spawn.Process(target=giving, args=(rank, tensors, handovers)) for rank in range(GIVERS)]
    processes.append(spawn.Process(target=taking, args=(tensors, handovers, results)))
    for process in processes:
        process.start()
    found = [results.get() for _ in handovers][1:]  # the first touches memory that is new
    for process in processes:
        process.join()
    ours, bare = ([each[side] for each in found] for side in (0, 1))
    gib = len(KINDS) * tensors * ROWS * COLUMNS * 4 / 2**30
    return Report(
        name="resize",
        size=f"{gib:.2f} GiB of masters and moments, {GIVERS} ranks to 1",
        comparisons=[
            Comparison(
                what="state handed over", against="the same bytes copied once", ours=ours, other=bare, target=2.0
            )
        ],
        numbers=[Number(what="handed over", values=[gib / each for each in ours], unit="GiB/s")],
        note="Buckets go through host memory that both sides have mapped: one copy in, one copy out.",
    )


if __name__ == "__main__":
    args = parser(__doc__, rounds=5, size=512, unit="MiB of each kind of state").parse_args()
    finish(measure(rounds=args.rounds, size=args.size), args.output)
