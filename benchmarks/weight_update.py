"""Measure one weight update from ranks to engines, against the least that its transport could take.

python -m benchmarks.weight_update collective-cpu delta-cpu                 # on two CPU cores
python -m benchmarks.weight_update 0.6b 8b                                  # one GPU; also with --backend megatron
python -m benchmarks.weight_update 8b --bucket-mib 256 --engine sglang      # the engine is SGLang
python -m benchmarks.weight_update 8b --ranks 4                             # an engine on each GPU; or --split
python -m benchmarks.weight_update 8b-collective                            # two ranks to engines on two other GPUs
python -m benchmarks.weight_update 8b --lora 32                             # adapters merged, against none
python -m benchmarks.weight_update 8b-adapters                              # adapters alone, to SGLang
python -m benchmarks.weight_update 0.6b --tiny                              # on a CPU: does it run?

An engine is a process that holds the model's parameters in bfloat16, or with `--engine sglang` CoreRL's SGLang engine
with its server. The update is timed as in a run without Ray, from the call of `update_weights` on the ranks and of
`receive` in the engine until both return. It includes the rendezvous, gathering each bucket from the backend's own
parameters, a checksum on each side, the engine's copy into its parameters, and its acknowledgment. Only parameters are
resident: no moments, no gradients. The other side is, by transport:

- `ipc`, on the ranks' own GPUs: the engine's load of ready buckets, without another process or a checksum; with SGLang
  that of a second SGLang, `sglang.Engine`, on the same GPUs. On several ranks an all-gather of as many bytes is added.
  A GPU then holds a shape's bytes three times, and the ranks' own parameters: the 8B shape needs one of 141 GB.
- `collective`, to engines on devices of their own, all sent by the first rank: a broadcast of a ready buffer, bucket
  after bucket, among as many other processes on the same devices; with SGLang, its own load is added.
- `delta`, which writes only what has changed: the same update by `disk`, with `--share` of the weights changed each
  time to the next number up or down, as after a step at a small learning rate. The page cache absorbs what is written.
- with `--lora`, the same update of the weights as they are; with `adapters`, SGLang's own load of ready adapters, in
  the same server.

At the end CoreRL's engines are asked whether they hold the weights that they were sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from benchmarks.engine_sides import Peer, Replica
from benchmarks.report import Comparison, Number, Report, arguments, finish, in_turns, joined, table
from benchmarks.shapes import QWEN3_8B, QWEN3_600M, tiny_shape
from benchmarks.steps import Work, in_ranks, join, quick_worker, synchronize
from corerl.config.schema import LoraConfig, TrainConfig, WeightsConfig
from corerl.trainer.worker import Worker
from corerl.types import MemoryKind, UpdateResult
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address
from corerl_testing.harness import Setup

HELD_OTHERS = "THE ENGINES DO NOT HOLD THE WEIGHTS THEY WERE SENT, so the ratio is meaningless:"
TIMEOUT = 300.0  # seconds that one side waits for the other
LIMIT = 900.0  # seconds of a case
BARE, SGLANG = "bare", "sglang"
QWEN3_90M = {  # 26 M parameters and 4.6 M a layer
    **QWEN3_600M,
    "vocab_size": 40000,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 14,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
}


@frozen(kw_only=True)
class Case:
    fields: Mapping[str, Any]  # of the model's config
    transport: str = "ipc"
    engine: str = BARE
    backend: str = "fsdp"
    ranks: int = 1
    engines: int = 0  # on ranks' devices, or on devices of their own; 0: as many as ranks
    split: bool = False  # one engine over all ranks' devices, each holding its part
    device: str = "cuda"
    dtype: str = "bfloat16"
    bucket_mib: float = 1024.0
    lora: int = 0  # rank of adapters
    adapters: bool = False  # which are sent alone
    shares: tuple[float, ...] = ()  # of the elements that are changed before each update
    target: float | None = 1.5

    @property
    def apart(self) -> bool:
        return self.transport != "ipc"

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def work(self) -> Work:
        """For the environment of the ranks."""
        options = {"transformer": "torch"} if self.backend == "megatron" and self.tiny else {}
        return Work(
            what="", fields=self.fields, backend=self.backend, ranks=self.ranks, device=self.device, options=options
        )


CASES = {
    "collective-cpu": Case(
        fields=QWEN3_90M, transport="collective", ranks=2, engines=1, device="cpu", dtype="float32", bucket_mib=256
    ),
    "delta-cpu": Case(
        fields=QWEN3_90M, transport="delta", device="cpu", bucket_mib=32, shares=(0.01, 0.1, 1.0), target=None
    ),
    "0.6b": Case(fields=QWEN3_600M),
    "8b": Case(fields=QWEN3_8B),
    "8b-collective": Case(fields=QWEN3_8B, transport="collective", ranks=2, target=1.4),
    "8b-adapters": Case(fields=QWEN3_8B, engine=SGLANG, lora=32, adapters=True, bucket_mib=512, target=1.3),
}


def started(case: Case) -> Worker:
    """A rank with the shape's parameters, and adapters if the case has them."""
    worker = quick_worker(
        Setup(
            backend=case.backend,
            model="",
            fields=case.fields,
            train=TrainConfig(precision="float32" if case.dtype == "float32" else "bfloat16"),
            options=case.work.options,
            weights=WeightsConfig(
                bucket_bytes=int(case.bucket_mib * 2**20),
                dtype=case.dtype,  # type: ignore[arg-type]
                lora="adapter" if case.adapters else "merged",
            ),
            device=case.device,
            lora=lora_of(case),
        )
    )
    worker.sleep(frozenset(MemoryKind) - {MemoryKind.PARAM})  # masters and gradients, where a backend has them already
    return worker


def lora_of(case: Case) -> LoraConfig | None:
    return LoraConfig(rank=case.lora).settled({}) if case.lora else None


# ---- what takes the updates ------------------------------------------------------------------------------------------


class Engine:
    """The processes that this rank's updates go to, and those whose work is the other side."""

    def __init__(
        self, case: Case, manifest: Manifest, adapters: Manifest | None, address: Address, *, index: int
    ) -> None:
        rank, world, apart = dist.get_rank(), dist.get_world_size(), case.apart
        self._case = case
        self.peers: list[Peer] = []  # CoreRL's engine, then SGLang alone
        if case.engine == BARE and rank < (case.engines or world):
            gpu = rank + apart * world
            self.peers.append(Peer("bare", manifest, address, index, world if case.split else 1, gpu))
        elif case.engine == SGLANG and not (case.split and rank > 0):
            on_one = () if case.tiny or (world == 1 and not apart) else (str(rank + apart * world),)
            replica = Replica(
                fields={**case.fields, "max_position_embeddings": 4096, "pad_token_id": 0},
                index=index,
                gpus=world if case.split else 1,
                devices=() if case.split else on_one,
                tiny=case.tiny,
                lora=lora_of(case) if case.adapters else None,
            )
            # One after the other: each measures how much memory is free.
            self.peers.append(Peer("corerl", replica, manifest, adapters, address, environment=replica.environment))
            if not case.adapters:
                self.peers.append(Peer("alone", replica, manifest, environment=replica.environment))

    def begin(self, version: int, *, adapters: bool) -> None:
        for peer in self.peers[:1]:
            peer.pipe.send(version if self._case.engine == BARE else (version, adapters))

    def end(self) -> None:
        """Returns when the engine has the version that it was begun with."""
        for peer in self.peers[:1]:
            if error := peer.pipe.recv():
                raise AssertionError(error)

    def load(self) -> float:
        """Seconds of the other side, on this rank."""
        return max((float(peer.ask("load")) for peer in self.peers[-1:]), default=0.0)

    def verified(self, sent: Mapping[str, int]) -> str:
        """How CoreRL's engine differs from what was `sent`; "" if it does not, or holds parts."""
        if not self.peers or (self._case.split and self._case.engine == BARE):
            return ""
        try:
            held = self.peers[0].ask("sums") or {}
        except (EOFError, ConnectionError):  # what was measured is reported all the same
            return "an engine has ended, asked for what it holds"
        wrong = [name for name in sent if held.get(name) != sent[name]]
        return f"an engine holds {len(wrong)} of {len(sent)} tensors otherwise, or cannot tell" if wrong else ""

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


class Broadcast:
    """The processes that broadcast: one on each engine's device, and on the first rank one on the sender's."""

    def __init__(self, case: Case, manifest: Manifest) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        engines = case.engines or world
        self._peers = [Peer("broadcast", manifest, case.device, world + rank)] if rank < engines else []
        self._peers += [Peer("broadcast", manifest, case.device, 0)] if rank == 0 else []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = [free.getsockname()[1]]
        dist.broadcast_object_list(port, src=0)
        for each, member in zip(self._peers, (1 + rank, 0), strict=False):
            meeting = f"tcp://127.0.0.1:{port[0]}"
            each.pipe.send({"init_method": meeting, "rank": member, "world_size": 1 + engines})
        for each in self._peers:
            each.pipe.recv()

    def seconds(self) -> float:
        for peer in self._peers:
            peer.pipe.send("broadcast")
        return max((float(peer.pipe.recv()) for peer in self._peers), default=0.0)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def address_of(case: Case, transport: str, directory: str) -> Address:
    """Called on every rank: where ranks and engines meet."""
    world, listening = dist.get_world_size(), None
    engines = (
        ("engine-0",) * world if case.split else tuple(f"engine-{index}" for index in range(case.engines or world))
    )
    if transport == "collective" and dist.get_rank() == 0:
        listening = socket.create_server(("127.0.0.1", 0))
    said = [(uuid.uuid4().hex, listening.getsockname()[1] if listening else 0, f"{directory}/{transport}")]
    dist.broadcast_object_list(said, src=0)
    token, port, path = said[0]
    return Address(
        transport=transport,
        engines=engines,
        host="127.0.0.1" if transport == "collective" else "",
        port=port,
        path=path,
        listen_fd=listening.detach() if listening else None,
        token=token,
        senders=tuple(range(len(engines))) if transport == "ipc" else (),
        device=case.device,
        timeout=TIMEOUT,
    )


# ---- measuring -------------------------------------------------------------------------------------------------------


class Updates:
    """A rank and its updates over one transport."""

    def __init__(self, case: Case, transport: str, directory: str) -> None:
        self.case, self.worker = case, started(case)
        self.device = torch.device(case.device)
        self.manifest = self.worker.manifest()
        if case.engine == SGLANG:
            self.worker.clear_memory()
        self.adapters = self.worker.manifest(adapters=True) if case.adapters else None
        self._address = address_of(case, transport, directory)
        theirs = evolve(self._address, listen_fd=None)
        self.engine = Engine(case, self.manifest, self.adapters, theirs, index=dist.get_rank())
        self.version = 0
        self.seconds: dict[str, float] = defaultdict(float)  # where the last update spent its time, by name

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def update(self, *, verify: bool = False, adapters: bool = False) -> tuple[float, UpdateResult]:
        """Seconds until the slowest rank has done it, all having begun at once."""
        self.version += 1
        self.seconds.clear()
        self.worker.trace(self.span)
        synchronize(self.device)
        dist.barrier()
        began = time.perf_counter()
        self.engine.begin(self.version, adapters=adapters)
        result = self.worker.update_weights(self._address, self.version, verify, adapters)
        self.engine.end()
        took = slowest(time.perf_counter() - began)
        assert not any(result.engines.values()), result.engines
        return took, result

    def wrong(self) -> list[str]:
        """How engines on all ranks differ from what another update sent."""
        sums: list[Mapping[str, int]] = [self.update(verify=True)[1].sums]
        dist.broadcast_object_list(sums, src=0)  # those of the first alone are known
        wrong = [""] * dist.get_world_size()
        dist.all_gather_object(wrong, self.engine.verified(sums[0]))
        return [each for each in wrong if each]


def measure(case: Case, rounds: int) -> Report:
    """Called on every rank; the report is the first one's."""
    join(case.work)
    with tempfile.TemporaryDirectory(prefix="update-") as directory:
        ours = Updates(case, case.transport, directory)
        disk = Updates(case, "disk", directory) if case.transport == "delta" else None
        broadcast = None
        if case.transport == "collective" and not case.lora:
            broadcast = Broadcast(case, ours.manifest)
        ours.update()
        comparisons, numbers = [], []
        for share in case.shares or (0.0,):
            parts: dict[str, list[float]] = defaultdict(list)
            what = f"{share:.0%} of the weights changed: " if share else ""

            def update(_: int) -> float:
                change(ours.worker, share)  # noqa: B023  # called in this pass of the loop
                took, result = ours.update(adapters=case.adapters)
                parts["bytes"].append(result.bytes)  # noqa: B023
                for name, seconds in ours.seconds.items():
                    parts[name].append(seconds)  # noqa: B023
                return took

            other = partial(limit, ours, disk, broadcast, share)
            in_turns(1, update, other)  # warms up
            parts.clear()
            seconds, others = in_turns(rounds, update, other)
            comparisons.append(
                Comparison(
                    what=f"{what}one update", against=against(case), ours=seconds, other=others, target=case.target
                )
            )
            sent = parts.pop("bytes")
            rate = [count / each / 1e9 for count, each in zip(sent, seconds, strict=True)]
            numbers += [
                Number(what=f"{what}sent", values=[count / 2**20 for count in sent], unit="MiB"),
                Number(what=f"{what}bytes a second", values=rate, unit="GB/s"),
                *(
                    Number(what=f"{what}in it: {part}", values=values, unit="s")
                    for part, values in sorted(parts.items())
                ),
            ]
        wrong = [] if case.adapters else [each for side in (ours, disk) if side is not None for each in side.wrong()]
        ours.engine.close()
        if disk is not None:
            disk.engine.close()
        if broadcast is not None:
            broadcast.close()
        ours.worker.shutdown("measured")
    total = sum(bucket.numel for bucket in ours.manifest.buckets)
    world = dist.get_world_size()
    placed = (
        "one over all" if case.split else f"{case.engines or world} on {'other' if case.apart else 'their'} devices"
    )
    engine = "a stand-in for SGLang" if case.tiny and case.engine == SGLANG else case.engine
    return Report(
        name="weight_update",
        size=f"{case.transport}: {total / 1e6:.4g} M parameters in {case.dtype}, buckets of {case.bucket_mib:g} MiB, "
        f"{world} {case.backend} ranks, engines {placed}: {engine}"
        f"{f', adapters of rank {case.lora}' if case.lora else ''}",
        comparisons=comparisons,
        numbers=numbers,
        note="Parts are those of the first rank, which continues while its engine loads."
        + (f" {HELD_OTHERS} {'; '.join(wrong)}." if wrong else ""),
    )


def limit(ours: Updates, disk: Updates | None, broadcast: Broadcast | None, share: float, _: int) -> float:
    """Seconds of the other side. Called on every rank."""
    case, engine, world = ours.case, ours.engine, dist.get_world_size()
    if disk is not None:
        change(disk.worker, share)
        return disk.update()[0]
    if case.lora and not case.adapters:
        with mock.patch.object(ours.worker.backend, "_merged", ()):
            return ours.update()[0]
    # Bare engines with devices of their own copy while the next bucket arrives.
    took = slowest(engine.load()) if case.engine == SGLANG or not case.apart else 0.0
    if broadcast is not None:
        took += slowest(broadcast.seconds())
    elif world > 1 and not case.adapters:
        took += gathering(ours.manifest, world, ours.device)
    return took


def against(case: Case) -> str:
    if case.transport == "delta":
        return "the same by disk"
    if case.lora and not case.adapters:
        return "the same update of the weights as they are"
    whose = "the engine" if case.engine == BARE else "the stand-in" if case.tiny else "SGLang"
    load = f"{whose}'s load of ready {'adapters' if case.adapters else 'buckets'}"
    moved = "a broadcast of the bytes" if case.apart else "an all-gather of the bytes" if case.ranks > 1 else ""
    return " and ".join(filter(None, ("" if case.apart and case.engine == BARE else load, moved)))


def change(worker: Worker, share: float) -> None:
    """That share of the weights becomes the next number of bfloat16 up or down."""
    generator = torch.Generator().manual_seed(worker.context.rank)
    for weights in worker.backend.on_device(MemoryKind.PARAM) if share else ():
        bits = weights.bfloat16().view(torch.int16)
        chosen = torch.rand(bits.shape, generator=generator) < share
        bits += chosen * (2 * torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16) - 1)
        weights.copy_(bits.view(torch.bfloat16))


def slowest(seconds: float) -> float:
    everyone = [seconds] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return max(everyone)


def gathering(manifest: Manifest, world: int, device: torch.device) -> float:
    """Seconds of an all-gather of each bucket from equal shares."""
    dtype = getattr(torch, manifest.dtype)
    largest = -(-max(bucket.numel for bucket in manifest.buckets) // world)
    share, out = (torch.zeros(size, dtype=dtype, device=device) for size in (largest, largest * world))
    took = 0.0
    for again in (False, True):  # the first time NCCL connects
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        for bucket in manifest.buckets:
            size = -(-bucket.numel // world)
            dist.all_gather_into_tensor(out[: size * world], share[:size])
        synchronize(device)
        took = slowest(time.perf_counter() - began) if again else 0.0
    return took


def main() -> None:
    command = arguments(__doc__, rounds=7)
    command.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    command.add_argument("--backend", help="of the ranks")
    command.add_argument("--engine", choices=(BARE, SGLANG), help="what takes the update")
    command.add_argument("--ranks", type=int)
    command.add_argument("--bucket-mib", type=float)
    command.add_argument("--split", action="store_true", help="one engine over all ranks' GPUs, each holding its part")
    command.add_argument("--lora", type=int, metavar="RANK", help="merge adapters of this rank")
    args = command.parse_args()
    reports = []
    for name in args.cases:
        own = {name: getattr(args, name) for name in ("backend", "engine", "ranks", "bucket_mib", "lora")}
        case = evolve(CASES[name], split=args.split, **{key: value for key, value in own.items() if value is not None})
        case = evolve(case, device="cpu", fields=tiny_shape(case.fields)) if args.tiny else case
        if case.apart and case.split:
            command.error("--split: engines on other devices are one for each rank; leave --split out")
        if case.apart and case.engine == SGLANG:  # as its processes have them: both sides of a group must agree
            os.environ.update(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="0")
        reports.append(in_ranks("benchmarks.weight_update:measure", case, args.rounds, work=case.work, limit=LIMIT))
        print(f"{reports[-1].size}\n\n{table(reports[-1:])}\n\n{reports[-1].note}\n", flush=True)
        if args.output:
            finish(joined("weight_update", reports), args.output)
    if any(HELD_OTHERS in report.note for report in reports):
        sys.exit(HELD_OTHERS)


if __name__ == "__main__":
    from benchmarks import weight_update  # not as __main__: what ranks get is pickled with the name of its module

    weight_update.main()
