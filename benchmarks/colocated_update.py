"""Measure one weight update from ranks to engines: on the same GPUs by CUDA IPC, against the engine's own load of ready
buckets, or on other GPUs by NCCL, against a broadcast of the bytes.

python -m benchmarks.colocated_update 0.6b 8b                               # one GPU
python -m benchmarks.colocated_update 0.6b 8b --engine sglang               # the same, with engines that are SGLang
python -m benchmarks.colocated_update 8b --bucket-mib 256 --backend megatron
python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.colocated_update 8b          # 4 engines
python -m torch.distributed.run --standalone --nproc-per-node 4 -m benchmarks.colocated_update 8b --split  # one over 4
torchrun --standalone --nproc-per-node 2 -m benchmarks.colocated_update 8b --apart                         # on 2 others
torchrun --standalone --nproc-per-node 2 -m benchmarks.colocated_update 8b --apart --engine sglang         # of SGLang
python -m benchmarks.colocated_update 8b --lora 32                          # adapters merged, against none
python -m benchmarks.colocated_update 0.6b --tiny                           # on a CPU: does it run?

An engine is a process that holds the model's parameters in bfloat16. The update is timed as in a run, from the call of
`update_weights` on the ranks and of `receive` in the engine until both return. It includes the rendezvous, gathering
each bucket in bfloat16 from the backend's own parameters, a checksum on each side, the engine's copy into its
parameters, and its acknowledgment. The other side is that copy alone, in the engine, from a ready buffer of a bucket's
size, without another process or a checksum. On several ranks an all-gather of as many bytes is added. Only parameters
are resident: no moments, no gradients.

With `--engine sglang` an engine is CoreRL's SGLang engine with its server, in a separate process. The other side is a
second SGLang on the same GPUs, `sglang.Engine`, which is passed ready flattened buckets of the same tensors. At the end
each engine is asked whether it holds the weights it was sent. A GPU then holds a shape's bytes three times in addition
to the ranks' own parameters: the 8B shape needs one of 141 GB.

With `--lora RANK` the ranks have adapters on all linear layers, and merge them into each bucket; the other side is the
same update, with the same engine, of the weights as they are.

With `--apart` each rank's engine is on a GPU of its own, and the first rank sends everything. The other side is a
broadcast of a ready buffer, bucket after bucket, from a process on the first rank's GPU to one on each engine's; with
`--engine sglang`, that and SGLang's own load, one after the other, while CoreRL's engines load one bucket as the next
arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import evolve

from benchmarks.report import Comparison, Number, Report, finish, in_turns, table
from benchmarks.steps import QWEN3_8B, QWEN3_600M, TINY, QuickWeights
from corerl.config.schema import LoraConfig, TrainConfig, WeightsConfig
from corerl.plugin.transports import open_receiver
from corerl.trainer.worker import Worker
from corerl.types import MemoryKind, UpdateResult
from corerl.weights.chunks import Chunk
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address
from corerl_testing.harness import Setup, make_worker

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6b": QWEN3_600M,
    "8b": QWEN3_8B,
}
TARGET, TARGET_APART = 1.5, 1.4
BARE, BROADCAST = "--bare", "--broadcast"  # how this program starts itself: as an engine, and to broadcast only
DIFFERENT = "THE ENGINES DO NOT HOLD THE WEIGHTS THEY WERE SENT, so the ratio is meaningless:"
# What torch's launcher tells its ranks: an engine would take their place, or their store, for its own.
LAUNCHER = re.compile(r"(TORCHELASTIC|MASTER|GROUP|ROLE)_|(LOCAL_)?(RANK|WORLD_SIZE)$")
TIMEOUT = 300.0  # seconds that one side waits for the other


# ---- the engine ------------------------------------------------------------------------------------------------------


def serve_bare(pipe: Connection) -> None:
    """An engine's process: it is told what it is, and then answers each order with its seconds. With more than one of
    `parts` it holds its part of each tensor's first axis."""
    manifest, address, index, parts, gpu = pipe.recv()
    if address.device == "cuda":
        torch.cuda.set_device(gpu)
    device, dtype = torch.device(address.device), getattr(torch, manifest.dtype)
    own = {entry.name: part_of(torch.empty(entry.shape, device="meta"), index, parts) for entry in entries(manifest)}
    weights = {name: torch.zeros(each.shape, dtype=dtype, device=device) for name, each in own.items()}
    receiver = open_receiver(address, index=index)
    largest = max(bucket.numel for bucket in manifest.buckets)

    @torch.no_grad()
    def load(bucket: Bucket, flat: torch.Tensor) -> None:
        for name, tensor in bucket.views(flat).items():
            weights[name].copy_(part_of(tensor, index, parts))

    def receive(version: int) -> None:
        for bucket, flat in receiver.buckets(manifest, version):
            load(bucket, flat)
            del flat

    def load_ready(ready: torch.Tensor) -> None:
        for bucket in manifest.buckets:
            load(bucket, ready[: bucket.numel])
        synchronize(device)

    pipe.send("there")
    while (order := pipe.recv()) is not None:
        if order == "load":
            ready = torch.zeros(largest, dtype=dtype, device=device)
            load_ready(ready)  # its first touch
            began = time.perf_counter()
            load_ready(ready)
            pipe.send(time.perf_counter() - began)
            del ready
        else:
            began = time.perf_counter()
            receive(int(order))
            pipe.send(time.perf_counter() - began)
    receiver.close()


def serve_broadcast(pipe: Connection) -> None:
    """A process beside an engine, or the sender: it is told what is sent and whom to meet, and then answers each order
    with the seconds of a broadcast of all buckets from the first of the members."""
    manifest, device_type, gpu = pipe.recv()
    if device_type == "cuda":
        torch.cuda.set_device(gpu)
    device, dtype = torch.device(device_type), getattr(torch, manifest.dtype)
    pipe.send("there")
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", **pipe.recv())
    pipe.send("met")
    while pipe.recv() is not None:
        ready = torch.zeros(max(bucket.numel for bucket in manifest.buckets), dtype=dtype, device=device)
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        for bucket in manifest.buckets:
            dist.broadcast(ready[: bucket.numel], src=0)
        synchronize(device)
        pipe.send(time.perf_counter() - began)
        del ready
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine's


def entries(manifest: Manifest) -> Iterator[Any]:
    for bucket in manifest.buckets:
        yield from bucket.entries


def part_of(tensor: torch.Tensor, index: int, parts: int) -> torch.Tensor:
    """What one of `parts` processes holds: its share of the first axis; all, where that cannot be split evenly."""
    if parts == 1 or tensor.ndim < 2 or tensor.shape[0] % parts:
        return tensor
    return tensor.chunk(parts)[index]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the trainer -----------------------------------------------------------------------------------------------------


class Spans:
    """Where a rank's update spends its time: seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began


def fields_of(shape: str, tiny: bool) -> dict[str, Any]:
    return {**SHAPES[shape], **(TINY if tiny else {})}


def started(shape: str, backend: str, bucket_mib: float, *, lora: int, tiny: bool) -> Worker:
    """A rank with the shape's parameters, and adapters of rank `lora`; 0: without."""
    setup = Setup(
        backend=backend,
        model="",
        fields=fields_of(shape, tiny),
        train=TrainConfig(precision="bfloat16"),
        weights=WeightsConfig(bucket_bytes=int(bucket_mib * 2**20), dtype="bfloat16"),
        device="cpu" if tiny else "cuda",
        lora=LoraConfig(rank=lora).settled({}) if lora else None,
    )
    worker = make_worker(setup)

    def weights(chunks: Sequence[Chunk]) -> QuickWeights:
        return QuickWeights({chunk.name: chunk.shape for chunk in chunks}, torch.device(setup.device))

    with mock.patch.object(worker.backend, "initial_weights", weights):
        worker.init("127.0.0.1", 0)
    worker.sleep(frozenset(MemoryKind) - {MemoryKind.PARAM})  # masters and gradients, where a backend has them already
    return worker


class Peer:
    """A process that is an engine, or one that only broadcasts to engines."""

    def __init__(self, *program: str, told: tuple[Any, ...], environment: Mapping[str, str] | None = None) -> None:
        """`program`: a module, and words for it. Returns when it is there."""
        with Listener(family="AF_UNIX") as listener:
            started = [sys.executable, "-m", *program, str(listener.address)]
            inherited = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
            self._process = subprocess.Popen(started, env={**inherited, **(environment or {})})
            self.pipe = listener.accept()
        self.pipe.send(told)
        assert self.pipe.recv() == "there"

    def ask(self, order: Any) -> Any:
        self.pipe.send(order)
        return self.pipe.recv()

    def close(self) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended already
            self.pipe.send(None)
        self._process.wait()


class Broadcast:
    """The processes that this rank has to broadcast between: one on its engine's GPU, and on the first rank one on the
    sender's."""

    def __init__(self, manifest: Manifest, device: str, *, rank: int, world: int) -> None:
        def peer(gpu: int) -> Peer:
            return Peer("benchmarks.colocated_update", BROADCAST, told=(manifest, device, gpu))

        self._peers = [peer(world + rank), *([peer(0)] if rank == 0 else [])]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = [free.getsockname()[1]]
        dist.broadcast_object_list(port, src=0)
        for each, member in zip(self._peers, (1 + rank, 0), strict=False):
            each.pipe.send({"init_method": f"tcp://127.0.0.1:{port[0]}", "rank": member, "world_size": 1 + world})
        assert all(each.pipe.recv() == "met" for each in self._peers)

    def seconds(self) -> float:
        for peer in self._peers:
            peer.pipe.send("broadcast")
        return max(float(peer.pipe.recv()) for peer in self._peers)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class Bare:
    """The process of this rank's own engine, or of its part."""

    name = ""
    what = "the engine's load of ready buckets"

    def __init__(self, manifest: Manifest, address: Address, *, rank: int, world: int, split: bool, apart: bool):
        told = (manifest, address, rank, world if split else 1, rank + apart * world)
        self._peer = Peer("benchmarks.colocated_update", BARE, told=told)
        self._apart = apart
        if apart:
            self.what = ""  # it copies while the next bucket arrives

    def begin(self, version: int) -> None:
        self._peer.pipe.send(version)

    def end(self) -> None:
        """Returns when the engine has the version that it was begun with."""
        self._peer.pipe.recv()

    def limit(self) -> float:
        """Seconds of the other side, on this rank."""
        return 0.0 if self._apart else float(self._peer.ask("load"))

    def verified(self, sent: Mapping[str, int]) -> list[str]:
        """How engines differ from what was `sent`: these cannot tell."""
        return []

    def close(self) -> None:
        self._peer.close()


class Sglang:
    """The same with engines that are SGLang, CoreRL's and another one; the first rank has an engine over all."""

    def __init__(
        self,
        manifest: Manifest,
        address: Address,
        fields: Mapping[str, Any],
        *,
        rank: int,
        world: int,
        split: bool,
        apart: bool,
        tiny: bool,
    ):
        from benchmarks.sglang_sides import Replica  # its plugin is installed where this is asked for

        self.name = "a stand-in for SGLang" if tiny else "SGLang"
        self.what = f"{'the stand-in' if tiny else 'SGLang'}'s load of ready buckets"
        self._peers: list[Peer] = []
        if split and rank > 0:
            return
        on_one = () if tiny or (world == 1 and not apart) else (str(rank + apart * world),)
        replica = Replica(
            fields={**fields, "max_position_embeddings": 4096, "pad_token_id": 0},
            index=rank,
            gpus=world if split else 1,
            devices=() if split else on_one,
            tiny=tiny,
        )
        told = (replica, manifest, address)
        # One after the other: each looks how much memory there is.
        for side in ("corerl", "alone"):
            self._peers.append(Peer("benchmarks.sglang_sides", side, told=told, environment=replica.environment))

    def begin(self, version: int) -> None:
        for peer in self._peers[:1]:
            peer.pipe.send(version)

    def end(self) -> None:
        for peer in self._peers[:1]:
            if error := peer.pipe.recv():
                raise AssertionError(error)

    def limit(self) -> float:
        return max((float(peer.ask("load")) for peer in self._peers[1:]), default=0.0)

    def verified(self, sent: Mapping[str, int]) -> list[str]:
        from benchmarks.sglang_sides import differences

        found = []
        for peer, order in zip(self._peers, ("sums", "held"), strict=False):
            try:
                told = peer.ask(order)
            except (EOFError, ConnectionError):  # what was measured is reported all the same
                found.append(f"an engine has ended, asked for its {order}")
                continue
            found.append(differences(sent, told) if order == "sums" else told)
        return [each for each in found if each]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


def address_of(engines: tuple[str, ...], *, apart: bool, device: str) -> Address:
    """Called on every rank: where ranks and engines meet."""
    rank, listening = dist.get_rank(), None
    if apart and rank == 0:
        listening = socket.create_server(("127.0.0.1", 0))
    said = [(uuid.uuid4().hex, listening.getsockname()[1] if listening else 0)]
    dist.broadcast_object_list(said, src=0)
    token, port = said[0]
    return Address(
        transport="collective" if apart else "ipc",
        engines=engines,
        host="127.0.0.1" if apart else "",
        port=port,
        listening=listening.detach() if listening else None,
        token=token,
        senders=() if apart else tuple(range(len(engines))),
        device=device,
        timeout=TIMEOUT,
    )


def measure(
    shape: str,
    *,
    backend: str,
    engine: str,
    rounds: int,
    bucket_mib: float,
    split: bool,
    apart: bool,
    tiny: bool,
    lora: int = 0,
) -> Report:
    """Called on every rank; the report is the first one's."""
    worker = started(shape, backend, bucket_mib, lora=lora, tiny=tiny)
    rank, world = dist.get_rank(), dist.get_world_size()
    manifest = worker.manifest()
    device = torch.device("cpu" if tiny else "cuda")
    engines = ("engine-0",) * world if split else tuple(f"engine-{index}" for index in range(world))
    address = address_of(engines, apart=apart, device=device.type)
    theirs = evolve(address, listening=None)
    where: dict[str, Any] = {"rank": rank, "world": world, "split": split, "apart": apart}
    sides: Bare | Sglang
    if engine == "sglang":
        worker.clear_memory()
        sides = Sglang(manifest, theirs, fields_of(shape, tiny), tiny=tiny, **where)
    else:
        sides = Bare(manifest, theirs, **where)
    broadcast = Broadcast(manifest, device.type, rank=rank, world=world) if apart and not lora else None
    moved = "a broadcast of the bytes" if broadcast else "an all-gather of the bytes" if world > 1 else ""
    spans = Spans()
    worker.trace(spans)
    version = 0

    def update(verify: bool = False) -> tuple[float, UpdateResult]:
        nonlocal version
        version += 1
        spans.seconds.clear()

        def both() -> UpdateResult:
            sides.begin(version)
            result = worker.update_weights(address, version, verify)
            sides.end()
            return result

        took, result = together(both, device)
        assert not any(result.engines.values()), result.engines
        return took, result

    def limit(_: int) -> float:
        if lora:
            with mock.patch.object(worker.backend, "_merged", ()):
                return update()[0]
        took = slowest(sides.limit())
        if broadcast:
            return took + slowest(broadcast.seconds())
        return took + (gathering(manifest, world, device) if world > 1 else 0.0)

    update()
    limit(0)
    parts_of: dict[str, list[float]] = defaultdict(list)

    def ours(_: int) -> float:
        took, _result = update()
        for name, seconds in spans.seconds.items():
            parts_of[name].append(seconds)
        return took

    seconds, others = in_turns(rounds, ours, limit)
    _, result = update(verify=engine == "sglang")
    sums: list[Mapping[str, int]] = [result.sums]
    dist.broadcast_object_list(sums, src=0)  # those of the first alone are told
    wrong: list[list[str]] = [[]] * world
    dist.all_gather_object(wrong, sides.verified(sums[0]))
    sides.close()
    if broadcast:
        broadcast.close()
    worker.shutdown("measured")
    sent = result.bytes
    held = "The engines of both sides held the weights they were sent." if engine == "sglang" else ""
    if found := [each for every in wrong for each in every]:
        held = f"{DIFFERENT} {'; '.join(found)}."
    return Report(
        name="colocated_update",
        size=f"{'tiny ' if tiny else ''}{shape} shape, {sent / 2**30:.3g} GiB in bfloat16, {len(manifest.buckets)} "
        f"buckets of at most {bucket_mib:g} MiB on both sides, {world} {backend} rank{'s' * (world > 1)}, "
        f"{'one engine over all of them' if split else 'an engine ' + ('for' if apart else 'on') + ' each'}"
        f"{', on GPUs of their own' if apart else ''}{', of ' + sides.name if sides.name else ''}"
        f"{f', adapters of rank {lora}' if lora else ''}",
        comparisons=[
            Comparison(
                what="one update with the adapters merged" if lora else "one update",
                against="the same update of the weights as they are"
                if lora
                else " and ".join(filter(None, (sides.what, moved))),
                ours=seconds,
                other=others,
                target=TARGET_APART if apart else TARGET,
            )
        ],
        numbers=[
            Number(what="bytes a second", values=[sent / each / 1e9 for each in seconds], unit="GB/s"),
            *(Number(what=f"in it: {name}", values=values, unit="s") for name, values in sorted(parts_of.items())),
        ],
        note=f"Parts are those of the first rank, which continues while its engine loads. {held}".strip(),
    )


def together(call: Callable[[], UpdateResult], device: torch.device) -> tuple[float, UpdateResult]:
    """Seconds until the slowest rank has done it, all having begun at once."""
    synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    result = call()
    return slowest(time.perf_counter() - began), result


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
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("shapes", nargs="+", choices=SHAPES)
    command.add_argument("--backend", default="fsdp")
    command.add_argument("--engine", choices=("bare", "sglang"), default="bare", help="what takes the update")
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--bucket-mib", type=float, nargs="+", default=[1024.0], help="one table row each")
    command.add_argument("--split", action="store_true", help="one engine over all ranks, each holding its part")
    command.add_argument("--apart", action="store_true", help="engines on GPUs of their own, which follow the ranks'")
    command.add_argument("--lora", type=int, default=0, metavar="RANK", help="merge adapters of this rank")
    command.add_argument("--tiny", action="store_true", help="a few parameters, on a CPU")
    command.add_argument("--output", help="a JSON file, for a single shape and size; without it tables are printed")
    args = command.parse_args()
    if args.apart and args.split and args.engine == "sglang":
        command.error("--split: SGLang apart is one for each rank; leave out --apart or --split")
    if args.apart and args.engine == "sglang":  # as its processes have them: both sides of a group must agree
        os.environ.update(NCCL_CUMEM_ENABLE="0", NCCL_NVLS_ENABLE="0")
    if "RANK" in os.environ:
        if not args.tiny:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if args.tiny else "cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group(
            "gloo" if args.tiny else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1
        )
    for shape in args.shapes:
        for bucket_mib in args.bucket_mib:
            report = measure(
                shape,
                backend=args.backend,
                engine=args.engine,
                rounds=args.rounds,
                bucket_mib=bucket_mib,
                split=args.split,
                apart=args.apart,
                tiny=args.tiny,
                lora=args.lora,
            )
            if dist.get_rank() == 0:
                print(f"{report.size}\n")
                print(f"{table([report])}\n\n{report.note}\n", flush=True)
                if args.output:
                    finish(report, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] in (BARE, BROADCAST):
        (serve_bare if sys.argv[1] == BARE else serve_broadcast)(Client(sys.argv[2]))
    else:
        main()
