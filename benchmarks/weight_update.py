"""Measure one weight update from ranks to engines, against the least that its transport could take.

python -m benchmarks.weight_update collective-cpu                           # on two CPU cores
python -m benchmarks.weight_update 0.6b 8b                                  # one GPU; also with --backend megatron
python -m benchmarks.weight_update 8b --bucket-mib 256 --engine sglang      # the engine is SGLang; also --split
python -m benchmarks.weight_update 8b --ranks 4                             # an engine on each GPU
python -m benchmarks.weight_update 8b-collective                            # two ranks to engines on two other GPUs
python -m benchmarks.weight_update 0.6b --tiny                              # on a CPU: does it run?

An engine is a process that holds the model's parameters in bfloat16, or with `--engine sglang` CoreRL's SGLang engine
with its server. The update is timed as in a run without Ray, from the call of `update_weights` on the ranks and of
`receive` in the engine until both return. It includes the rendezvous, gathering each bucket from the backend's own
parameters, a checksum on each side, the engine's copy into its parameters, and its acknowledgment. Only parameters are
resident: no moments, no gradients. The other side is, by transport:

- `ipc`, on the ranks' own GPUs: the engine's load of ready buckets, without another process or a checksum; with SGLang
  that of a second SGLang, `sglang.Engine`, on the same GPUs. On several ranks an all-gather of as many bytes is added.
  A GPU then holds a shape's bytes three times, and the ranks' own parameters: the 8B shape needs one of 141 GB.
- `collective`, to bare engines on devices of their own, all sent by the first rank: a broadcast of a ready buffer,
  bucket after bucket, among as many other processes on the same devices.

At the end CoreRL's engines are asked whether they hold the weights that they were sent.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from benchmarks.engine_sides import Peer, Replica
from benchmarks.report import Comparison, Number, Report, add_fields, arguments, changed, in_turns, tell
from benchmarks.shapes import QWEN3_8B, QWEN3_90M, QWEN3_600M, tiny_shape
from benchmarks.steps import Work, in_ranks, join, quick_worker, synchronize
from corerl.config.schema import TrainConfig, WeightsConfig
from corerl.types import MemoryKind, UpdateResult
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address
from corerl_testing.harness import Setup

HELD_OTHERS = "THE ENGINES DO NOT HOLD THE WEIGHTS THEY WERE SENT, so the ratio is meaningless:"
TIMEOUT = 300.0  # seconds that one side waits for the other
LIMIT = 900.0  # seconds of a case
BARE, SGLANG = "bare", "sglang"


@frozen(kw_only=True)
class Case:
    fields: Mapping[str, Any]  # of the model's config
    transport: str = "ipc"
    engine: str = BARE  # or SGLANG
    backend: str = "fsdp"
    ranks: int = 1
    engines: int = 0  # on ranks' devices, or on devices of their own; 0: as many as ranks
    split: bool = False  # one SGLang over all ranks' devices
    device: str = "cuda"
    dtype: str = "bfloat16"
    bucket_mib: float = 1024.0
    target: float = 1.5

    @property
    def apart(self) -> bool:
        return self.transport == "collective"

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

    @property
    def against(self) -> str:
        if self.apart:
            return "a broadcast of the bytes"
        whose = "the engine" if self.engine == BARE else "the stand-in" if self.tiny else "SGLang"
        return f"{whose}'s load of ready buckets{' and an all-gather of the bytes' if self.ranks > 1 else ''}"


CASES = {
    "collective-cpu": Case(
        fields=QWEN3_90M, transport="collective", ranks=2, engines=1, device="cpu", dtype="float32", bucket_mib=256
    ),
    "0.6b": Case(fields=QWEN3_600M),
    "8b": Case(fields=QWEN3_8B),
    "8b-collective": Case(fields=QWEN3_8B, transport="collective", ranks=2, target=1.4),
}

# ---- what takes the updates ------------------------------------------------------------------------------------------


class Engine:
    """The processes that this rank's updates go to, and those whose work is the other side."""

    def __init__(self, case: Case, manifest: Manifest, address: Address) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.peers: list[Peer] = []  # CoreRL's engine, then SGLang alone
        if case.engine == BARE and rank < (case.engines or world):
            gpu = rank + case.apart * world
            self.peers.append(Peer("bare", manifest, address, rank, gpu))
        elif case.engine == SGLANG and not (case.split and rank > 0):
            replica = Replica(
                fields={**case.fields, "max_position_embeddings": 4096, "pad_token_id": 0},
                index=rank,
                gpus=world if case.split else 1,
                devices=() if case.split or case.tiny or world == 1 else (str(rank),),
                tiny=case.tiny,
            )
            # One after the other: each measures how much memory is free.
            self.peers.append(Peer("corerl", replica, manifest, address, environment=replica.environment))
            self.peers.append(Peer("alone", replica, manifest, environment=replica.environment))

    def begin(self, version: int) -> None:
        for peer in self.peers[:1]:
            peer.pipe.send(version)

    def end(self) -> None:
        """Returns when the engine has the version that it was begun with."""
        for peer in self.peers[:1]:
            if error := peer.pipe.recv():
                raise AssertionError(error)

    def load(self) -> float:
        """Seconds of the other side, on this rank."""
        return max((float(peer.ask("load")) for peer in self.peers[-1:]), default=0.0)

    def verified(self, sent: Mapping[str, int]) -> str:
        """How CoreRL's engine differs from what was `sent`; "" if it does not."""
        if not self.peers:
            return ""
        try:
            held = self.peers[0].ask("sums") or {}
        except (EOFError, ConnectionError):  # what was measured is reported all the same
            return "an engine has ended, asked for what it holds"
        wrong = [name for name in sent if held.get(name) != sent[name]]
        return f"an engine holds {len(wrong)} of {len(sent)} tensors otherwise, or cannot tell" if wrong else ""


def broadcasting(case: Case, manifest: Manifest) -> list[Peer]:
    """The processes that broadcast: one on each engine's device, and on the first rank one on the sender's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engines = case.engines or world
    peers = [Peer("broadcast", manifest, case.device, world + rank)] if rank < engines else []
    peers += [Peer("broadcast", manifest, case.device, 0)] if rank == 0 else []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    for peer, member in zip(peers, (1 + rank, 0), strict=False):
        meeting = f"tcp://127.0.0.1:{port[0]}"
        peer.pipe.send({"init_method": meeting, "rank": member, "world_size": 1 + engines})
    for peer in peers:
        peer.pipe.recv()
    return peers


def address_of(case: Case) -> Address:
    """Called on every rank: where ranks and engines meet."""
    world, listening = dist.get_world_size(), None
    engines = (
        ("engine-0",) * world if case.split else tuple(f"engine-{index}" for index in range(case.engines or world))
    )
    if case.apart and dist.get_rank() == 0:
        listening = socket.create_server(("127.0.0.1", 0))
    said = [(uuid.uuid4().hex, listening.getsockname()[1] if listening else 0)]
    dist.broadcast_object_list(said, src=0)
    token, port = said[0]
    return Address(
        transport=case.transport,
        engines=engines,
        host="127.0.0.1" if case.apart else "",
        port=port,
        listen_fd=listening.detach() if listening else None,
        token=token,
        colocated_ranks=() if case.apart else tuple(range(len(engines))),
        device=case.device,
        timeout=TIMEOUT,
    )


# ---- measuring -------------------------------------------------------------------------------------------------------


class Updates:
    """A rank and its updates."""

    def __init__(self, case: Case) -> None:
        weights = WeightsConfig(
            bucket_bytes=int(case.bucket_mib * 2**20),
            dtype=case.dtype,  # type: ignore[arg-type]  # a name, as of every case
        )
        setup = Setup(
            backend=case.backend,
            model="",
            fields=case.fields,
            train=TrainConfig(precision="float32" if case.dtype == "float32" else "bfloat16"),
            options=case.work.options,
            weights=weights,
            device=case.device,
        )
        self.case, self.worker, self.device = case, quick_worker(setup), torch.device(case.device)
        # Masters and gradients, where a backend has them already.
        self.worker.sleep(frozenset(MemoryKind) - {MemoryKind.PARAM})
        self.manifest = self.worker.manifest()
        if case.engine == SGLANG:
            self.worker.clear_memory()
        self._address = address_of(case)
        self.engine = Engine(case, self.manifest, evolve(self._address, listen_fd=None))
        self.broadcast = broadcasting(case, self.manifest) if case.apart else []
        self._version = 0
        self.seconds: dict[str, float] = defaultdict(float)  # where the last update spent its time, by name

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def update(self, *, verify: bool = False) -> tuple[float, UpdateResult]:
        """Seconds until the slowest rank has done it, all having begun at once."""
        self._version += 1
        self.seconds.clear()
        self.worker.trace(self.span)
        synchronize(self.device)
        dist.barrier()
        began = time.perf_counter()
        self.engine.begin(self._version)
        result = self.worker.update_weights(self._address, self._version, verify, False)
        self.engine.end()
        took = slowest(time.perf_counter() - began)
        assert not any(result.engines.values()), result.engines
        return took, result

    def limit(self, _: int) -> float:
        """Seconds of the other side. Called on every rank."""
        if self.case.apart:
            for peer in self.broadcast:
                peer.pipe.send("broadcast")
            return slowest(max((float(peer.pipe.recv()) for peer in self.broadcast), default=0.0))
        gathered = gathering(self.manifest, self.device) if dist.get_world_size() > 1 else 0.0
        return slowest(self.engine.load()) + gathered

    def wrong(self) -> list[str]:
        """How engines on all ranks differ from what another update sent."""
        sums: list[Mapping[str, int]] = [self.update(verify=True)[1].sums]
        dist.broadcast_object_list(sums, src=0)  # those of the first alone are known
        wrong = [""] * dist.get_world_size()
        dist.all_gather_object(wrong, self.engine.verified(sums[0]))
        return [each for each in wrong if each]

    def close(self) -> None:
        for peer in (*self.engine.peers, *self.broadcast):
            peer.close()
        self.worker.shutdown("measured")


def measure(case: Case, rounds: int) -> Report:
    """Called on every rank; the report is the first one's."""
    join(case.work)
    updates = Updates(case)
    parts: dict[str, list[float]] = defaultdict(list)
    sent: list[int] = []

    def update(_: int) -> float:
        took, result = updates.update()
        sent.append(result.bytes)
        for name, seconds in updates.seconds.items():
            parts[name].append(seconds)
        return took

    updates.update()
    in_turns(1, update, updates.limit)  # warms up
    parts.clear()
    sent.clear()
    seconds, others = in_turns(rounds, update, updates.limit)
    wrong = updates.wrong()
    updates.close()
    rate = [count / each / 1e9 for count, each in zip(sent, seconds, strict=True)]
    total = sum(bucket.numel for bucket in updates.manifest.buckets)
    world = dist.get_world_size()
    where = "one over all" if case.split else f"{case.engines or world} on {'other' if case.apart else 'their'} devices"
    engine = "a stand-in for SGLang" if case.tiny and case.engine == SGLANG else case.engine
    return Report(
        name="weight_update",
        size=f"{case.transport}: {total / 1e6:.4g} M parameters in {case.dtype}, buckets of {case.bucket_mib:g} MiB, "
        f"{world} {case.backend} ranks, engines {where}: {engine}",
        comparisons=[
            Comparison(what="one update", against=case.against, ours=seconds, other=others, target=case.target)
        ],
        numbers=[
            Number(what="sent", values=[count / 2**20 for count in sent], unit="MiB"),
            Number(what="bytes a second", values=rate, unit="GB/s"),
            *(Number(what=f"in it: {part}", values=values, unit="s") for part, values in sorted(parts.items())),
        ],
        note="Parts are those of the first rank, which continues while its engine loads."
        + (f" {HELD_OTHERS} {'; '.join(wrong)}." if wrong else ""),
    )


def slowest(seconds: float) -> float:
    everyone = [seconds] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return max(everyone)


def gathering(manifest: Manifest, device: torch.device) -> float:
    """Seconds of an all-gather of each bucket from equal shares."""
    dtype, world = getattr(torch, manifest.dtype), dist.get_world_size()
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
    add_fields(command, Case, "backend", "engine", "ranks", "bucket_mib", "split")
    args = command.parse_args()
    reports = []
    for name in args.cases:
        case = changed(CASES[name], command, args)
        case = evolve(case, device="cpu", fields=tiny_shape(case.fields)) if args.tiny else case
        if case.engine not in (BARE, SGLANG):
            command.error(f"--engine: got {case.engine!r}, wanted {BARE} or {SGLANG}")
        if case.apart and case.engine == SGLANG:
            command.error(f"{name}: its engines are bare; leave --engine sglang out")
        if case.split and case.engine == BARE:
            command.error("--split: bare engines are one for each rank; add --engine sglang")
        reports.append(in_ranks("benchmarks.weight_update:measure", case, args.rounds, work=case.work, limit=LIMIT))
        tell("weight_update", reports, args.output)
    if any(HELD_OTHERS in report.note for report in reports):
        sys.exit(HELD_OTHERS)


if __name__ == "__main__":
    from benchmarks import weight_update  # not as __main__: what ranks get is pickled with the name of its module

    weight_update.main()
