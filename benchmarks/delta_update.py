"""Compare weight updates that write only what has changed with updates that write everything: seconds and bytes."""

from __future__ import annotations

import tempfile
import time

import torch
import torch.distributed as dist
from attrs import frozen

from benchmarks.report import Comparison, Number, Report, finish, in_turns, parser
from corerl.plugin.transports import open_receiver, open_sender
from corerl.weights import Address, Manifest, Receiver, WeightSender, build_manifest
from corerl_testing.pool import RankPool

SHARES = (0.01, 0.1, 1.0)  # of the elements that an update changes
SIDE = 1024  # of each square tensor


@frozen(kw_only=True)
class Ends:
    """What one process keeps between rounds: rank 0 the sender, rank 1 the receiver."""

    manifest: Manifest
    weights: torch.Tensor  # [numel] bfloat16: as sent, or as loaded
    sender: WeightSender | None
    receiver: Receiver | None
    generator: torch.Generator


# By transport. A pool's ranks call functions and keep nothing for them.
ENDS: dict[str, Ends] = {}


def meet(transport: str, directory: str, tensors: int, bucket_mib: int) -> int:
    """Called on both ranks. Elements of the model."""
    shapes = [(f"layers.{index}.weight", (SIDE, SIDE)) for index in range(tensors)]
    address = Address(transport=transport, engines=("engine-0",), path=f"{directory}/{transport}", timeout=300.0)
    generator = torch.Generator().manual_seed(0)
    numel, sends = tensors * SIDE * SIDE, dist.get_rank() == 0
    ENDS[transport] = Ends(
        manifest=build_manifest(shapes, dtype="bfloat16", bucket_bytes=bucket_mib * 2**20),
        weights=(0.02 * torch.randn(numel, generator=generator)).bfloat16() if sends else torch.zeros(numel).bfloat16(),
        sender=open_sender(address) if sends else None,
        receiver=None if sends else open_receiver(address, index=0),
        generator=generator,
    )
    return numel


def change(weights: torch.Tensor, share: float, generator: torch.Generator) -> None:
    """That share of the elements becomes the next number up or down, as after a step at a small learning rate."""
    bits = weights.view(torch.int16)
    for piece in bits.split(2**24):
        chosen = torch.rand(len(piece), generator=generator) < share
        piece += chosen * (2 * torch.randint(0, 2, (len(piece),), generator=generator) - 1)


def update(transport: str, version: int, share: float) -> tuple[float, int]:
    """Called on both ranks. Seconds from the start until the engine has loaded all, and bytes written."""
    ends = ENDS[transport]
    if ends.sender is not None:
        change(ends.weights, share, ends.generator)
    dist.barrier()
    began, at, written = time.perf_counter(), 0, 0
    if ends.receiver is not None:
        for bucket, flat in ends.receiver.buckets(ends.manifest, version):
            ends.weights[at : at + bucket.numel].copy_(flat)
            at += bucket.numel
    elif ends.sender is not None:
        ends.sender.open(ends.manifest, version)
        for bucket in ends.manifest.buckets:
            ends.sender.send(bucket, ends.weights[at : at + bucket.numel])
            at += bucket.numel
        assert not ends.sender.finish()
        written = ends.weights.nbytes if ends.sender.sent is None else ends.sender.sent
    return time.perf_counter() - began, written


def equal(transport: str) -> int:
    """Called on both ranks. A sum that is the same where the weights are."""
    bits = ENDS[transport].weights.view(torch.int16).long()
    return int((bits * torch.arange(len(bits)).remainder(8191)).sum())


def measure(*, rounds: int, size: int, bucket_mib: int) -> Report:
    comparisons, numbers = [], []
    pool = RankPool(2)
    try:
        with tempfile.TemporaryDirectory() as directory:
            versions = dict.fromkeys(("delta", "disk"), 0)
            numel = max(pool.run(meet, name, directory, size, bucket_mib)[0] for name in versions)

            def timed(transport: str, share: float, written: list[float]) -> float:
                versions[transport] += 1
                (seconds, nbytes), _ = pool.run(update, transport, versions[transport], share)
                written.append(nbytes / (2 * numel))
                return seconds

            for name in versions:
                timed(name, 0.0, [])  # the first update goes whole
            for share in SHARES:
                bytes_of: dict[str, list[float]] = {name: [] for name in versions}
                ours, other = in_turns(
                    rounds,
                    lambda _, s=share, b=bytes_of: timed("delta", s, b["delta"]),  # type: ignore[misc]
                    lambda _, s=share, b=bytes_of: timed("disk", s, b["disk"]),  # type: ignore[misc]
                )
                what = f"delta, {share:.0%} changed"
                comparisons.append(Comparison(what=what, against="disk", ours=ours, other=other))
                numbers.append(Number(what=f"{what}: bytes written", values=bytes_of["delta"], unit="x the weights"))
            for name in versions:
                sent, loaded = pool.run(equal, name)
                assert sent == loaded, f"{name}: the engine holds other weights than were sent"
    finally:
        pool.close()
    return Report(
        name="delta_update",
        size=f"{numel / 1e6:.1f} M bfloat16 parameters, {2 * numel / 1e6:.0f} MB, buckets of {bucket_mib} MiB",
        comparisons=comparisons,
        numbers=numbers,
        note=(
            "A sender with its buckets in host memory updates a receiver in another process of the same machine, over "
            "the local disk. The page cache absorbs what is written, so the time that a slower path would take for the "
            "bytes is not included. Changed elements become the next number up or down. If more than two of three have "
            "changed, the whole bucket is written."
        ),
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=7, size=48, unit="tensors of 1 M parameters")
    command.add_argument("--bucket-mib", type=int, default=32, help="weights.bucket_bytes in MiB (default: 32)")
    args = command.parse_args()
    finish(measure(rounds=args.rounds, size=args.size, bucket_mib=args.bucket_mib), args.output)
