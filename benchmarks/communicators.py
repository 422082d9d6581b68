"""Measure the GPU memory that NCCL's communicators hold, and how much of it suspending them releases.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.communicators

Three groups of two ranks or more, as for tensor, pipeline and data parallelism, are used, suspended, resumed and used
again, twice. In the end they are suspended once more and destroyed. Fails if a result is wrong after a resumption.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from benchmarks.report import commit
from corerl.memory.communicators import Communicators, refusal

MIB = 2**20
GROUPS = 3


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if reason := refusal():
        raise SystemExit(reason)

    def used() -> float:
        """MiB of the device outside of torch's allocator."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return (total - free - torch.cuda.memory_reserved(device)) / MIB

    def say(what: str, seconds: float | None = None) -> None:
        every: list[float] = [0.0] * ranks
        dist.all_gather_object(every, used())  # over gloo
        if rank == 0:
            took = "" if seconds is None else f", {1000 * seconds:.0f} ms"
            print(f"{what}: {', '.join(f'{each:.0f}' for each in every)} MiB of each GPU{took}", flush=True)

    def use(group: dist.ProcessGroup) -> None:
        summed = torch.full((4 * MIB,), float(rank + 1), device=device)
        dist.all_reduce(summed, group=group)
        assert bool((summed == ranks * (ranks + 1) / 2).all()), "a sum is wrong"
        received = torch.empty(MIB, device=device)
        sends = dist.P2POp(dist.isend, summed[:MIB], (rank + 1) % ranks, group)
        takes = dist.P2POp(dist.irecv, received, (rank - 1) % ranks, group)
        for work in dist.batch_isend_irecv([sends, takes]):
            work.wait()
        assert torch.equal(received, summed[:MIB]), "what was sent is not what came"

    if rank == 0:
        print(f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {commit()}")
    torch.zeros(1, device=device)
    say("context")
    groups = [dist.new_group() for _ in range(GROUPS)]
    communicators = Communicators(device)
    for group in groups:
        use(group)
    say(f"{GROUPS} groups used")
    for _ in range(2):
        started = time.perf_counter()
        communicators.suspend()
        say("suspended", time.perf_counter() - started)
        started = time.perf_counter()
        communicators.resume()
        say("resumed", time.perf_counter() - started)
        for group in groups:
            use(group)
    communicators.suspend()
    dist.destroy_process_group()
    if rank == 0:
        print("destroyed while suspended")


if __name__ == "__main__":
    main()
