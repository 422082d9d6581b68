"""Processes that stand for engines in benchmarks: CoreRL's, SGLang alone, and such as only load or broadcast buckets.

A `Peer` is one of them. It is given what it needs, answers "there", and then answers each order until it gets None:

    bare       receives updates as an engine does, and loads ready buckets into the same parameters
    broadcast  takes part in a broadcast of ready buckets from the first of its group
    corerl     SGLang's engine with the server that it starts, as in a run
    alone      `sglang.Engine`, which is passed flattened buckets that are already on its GPUs, in the same order:
               `update_weights_from_tensor(..., load_format="flattened_bucket")`. Its call does not wait for the copies
               on the device; CoreRL's does. Both have the same server arguments.
    generating `sglang.Engine`, which answers requests

On a CPU a stand-in replaces SGLang on both sides.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from benchmarks.runs import SERVER
from benchmarks.steps import QuickWeights, synchronize
from corerl.config.schema import ModelConfig
from corerl.engines.base import EngineContext
from corerl.models.config import hf_config
from corerl.plugin.transports import open_receiver
from corerl.weights.checksums import bit_sums
from corerl.weights.manifest import Bucket, Manifest

STAND_IN = "plugins.sglang.tests.stand_in"
# Nothing is generated after an update: a small KV cache and few graphs leave the GPU to weights.
SMALL = {**SERVER, "cuda_graph_max_bs_decode": 8, "max_total_tokens": 2**15}
OWN = ("custom_weight_loader", "enable_memory_saver")  # arguments that SGLang alone has no use for
START_SECONDS = 500.0
# What torch's launcher gives its ranks: an engine would take their place, or their store, for its own.
LAUNCHER = re.compile(r"(TORCHELASTIC|MASTER|GROUP|ROLE)_|(LOCAL_)?(RANK|WORLD_SIZE)$")


class Peer:
    """A process that serves."""

    def __init__(self, what: str, *given: Any, environment: Mapping[str, str] | None = None) -> None:
        """`what`: a key of SERVERS. Returns when it is there."""
        with Listener(family="AF_UNIX") as listener:
            command = [sys.executable, "-m", "benchmarks.engine_sides", what, str(listener.address)]
            inherited = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
            self._process = subprocess.Popen(command, env={**inherited, **(environment or {})})
            self.pipe = listener.accept()
        self.pipe.send(given)
        assert self.pipe.recv() == "there"

    def ask(self, order: Any) -> Any:
        self.pipe.send(order)
        return self.pipe.recv()

    def close(self) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended already
            self.pipe.send(None)
        self._process.wait()


def answer(
    pipe: Connection, orders: Mapping[str, Callable[[], Any]], other: Callable[[Any], Any] | None = None
) -> None:
    """Until None comes. What is not a name of `orders` is an argument of `other`."""
    pipe.send("there")
    while (order := pipe.recv()) is not None:
        pipe.send(orders[order]() if isinstance(order, str) else other(order) if other else None)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# ---- processes without SGLang ----------------------------------------------------------------------------------------


def serve_bare(pipe: Connection) -> None:
    """Orders: a version; "load" of ready buckets; "sums" of the bits that it holds, by tensor."""
    manifest, address, index, gpu = pipe.recv()
    if address.device == "cuda":
        torch.cuda.set_device(gpu)
    device, dtype = torch.device(address.device), getattr(torch, manifest.dtype)
    weights = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in manifest.shapes.items()}
    receiver = open_receiver(address, index=index)

    @torch.no_grad()
    def load(bucket: Bucket, flat: torch.Tensor) -> None:
        for name, tensor in bucket.views(flat).items():
            weights[name].copy_(tensor)

    def receive(version: int) -> str:
        for bucket, flat in receiver.buckets(manifest, version):
            load(bucket, flat)
            del flat
        return ""

    def load_ready() -> float:
        ready = torch.zeros(max(bucket.numel for bucket in manifest.buckets), dtype=dtype, device=device)

        def every() -> None:
            for bucket in manifest.buckets:
                load(bucket, ready[: bucket.numel])
            synchronize(device)

        every()  # its first touch
        return timed(every)

    answer(pipe, {"load": load_ready, "sums": lambda: bit_sums(weights)}, receive)
    receiver.close()


def serve_broadcast(pipe: Connection) -> None:
    manifest, device_type, gpu = pipe.recv()
    if device_type == "cuda":
        torch.cuda.set_device(gpu)
    device, dtype = torch.device(device_type), getattr(torch, manifest.dtype)

    def meet(members: Mapping[str, Any]) -> None:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", **members)

    def every(ready: torch.Tensor) -> None:
        for bucket in manifest.buckets:
            dist.broadcast(ready[: bucket.numel], src=0)
        synchronize(device)

    def broadcast() -> float:
        ready = torch.zeros(max(bucket.numel for bucket in manifest.buckets), dtype=dtype, device=device)
        dist.barrier()
        synchronize(device)
        took = timed(partial(every, ready))
        del ready
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine's
        return took

    answer(pipe, {"broadcast": broadcast}, meet)


# ---- CoreRL's engine -------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Replica:
    """One engine, as either side starts it."""

    fields: Mapping[str, Any]  # of the model's config
    index: int  # among the engines
    gpus: int  # that it is split over
    devices: tuple[str, ...]  # their numbers; empty takes the first that its process sees
    tiny: bool  # on a CPU, with a stand-in

    @property
    def options(self) -> Any:
        from corerl_sglang.config import SglangConfig

        if self.tiny:
            return SglangConfig(tensor_parallel=self.gpus, launcher=STAND_IN)
        return SglangConfig(
            tensor_parallel=self.gpus,
            memory=0.5,
            attention_backend=os.environ.get("ATTENTION", "triton"),
            start_timeout=START_SECONDS,
            server=SMALL,
        )

    @property
    def context(self) -> EngineContext:
        name, device = f"engine-{self.index}", "cpu" if self.tiny else "cuda"
        return EngineContext(
            name=name, index=self.index, device=device, precision="bfloat16", bundles=self.gpus, devices=self.devices
        )

    @property
    def environment(self) -> dict[str, str]:
        """For a process that sees no other GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}


def serve_corerl(pipe: Connection) -> None:
    """Orders: a version; "sums" of the bits that it holds, by tensor."""
    from corerl_sglang.start import start_engine

    replica, manifest, address = pipe.recv()
    engine = start_engine(ModelConfig(config=dict(replica.fields)), replica.options, replica.context)
    try:
        orders = {"sums": lambda: engine.weight_sums(manifest.dtype)}
        answer(pipe, orders, lambda version: engine.receive(manifest, version, address).error)
    finally:
        engine.close()


# ---- SGLang alone ----------------------------------------------------------------------------------------------------


def arguments_of(options: Any, context: EngineContext, fields: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The server's arguments, as CoreRL's engine makes them, for SGLang alone."""
    from corerl_sglang.arguments import server_arguments

    model = hf_config(ModelConfig(config=dict(fields)))
    model.eos_token_id = None
    model.save_pretrained(directory / "model")
    arguments = server_arguments(options, context, model=directory / "model")
    return {name: value for name, value in arguments.items() if name not in OWN}


def filled(manifest: Manifest, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each bucket, end to end in one buffer, with random weights."""
    weights = QuickWeights(manifest.shapes, device)
    for bucket in manifest.buckets:
        flat = torch.empty(bucket.numel, dtype=getattr(torch, manifest.dtype), device=device)
        tensors = bucket.views(flat)
        for name, view in tensors.items():
            view.copy_(weights.whole(name))
        yield tensors


def serve_alone(pipe: Connection) -> None:
    """Orders: "load"."""
    replica, manifest = pipe.recv()
    with tempfile.TemporaryDirectory(prefix="update-") as directory:
        arguments = arguments_of(replica.options, replica.context, replica.fields, Path(directory))
        load = (loading_stand_in if replica.tiny else loading)(arguments, replica.gpus, manifest)
        answer(pipe, {"load": lambda: timed(load)})


def loading(arguments: Mapping[str, Any], gpus: int, manifest: Manifest) -> Callable[[], None]:
    """SGLang's own engine, with buckets on each of its GPUs."""
    import sglang
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    engine: Any = sglang.Engine(**arguments, log_level="error")
    every: list[list[dict[str, Any]]] = []  # by bucket, by tensor-parallel rank
    for tensors in filled(manifest, torch.device("cuda", 0)):
        bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
        flat, metadata = bucket.get_flattened_tensor(), bucket.get_metadata()
        every.append([{"flattened_tensor": flat.to(f"cuda:{rank}"), "metadata": metadata} for rank in range(gpus)])
    torch.cuda.empty_cache()  # what was needed to make them belongs to the others
    for rank in range(gpus):
        torch.cuda.synchronize(rank)

    def load() -> None:
        for number, ranks in enumerate(every):
            # Serialized each time: the result is a handle, and whoever opens it gives it back.
            handed = [MultiprocessingSerializer.serialize(each) for each in ranks]
            last = number == len(every) - 1
            done, message = engine.update_weights_from_tensor(handed, load_format="flattened_bucket", flush_cache=last)
            if not done:
                raise RuntimeError(f"SGLang did not load bucket {number}: {message}")

    return load


def loading_stand_in(arguments: Mapping[str, Any], gpus: int, manifest: Manifest) -> Callable[[], None]:
    """The stand-in's own load, of one rank with the whole model, where there is no SGLang."""
    from plugins.sglang.tests.stand_in import Server

    (rank,) = Server({**arguments, "tp_size": 1}).ranks
    every = list(filled(manifest, torch.device("cpu")))

    @torch.inference_mode()
    def load() -> None:
        for tensors in every:
            rank.load_weights(tensors.items())

    return load


def serve_generating(pipe: Connection) -> None:
    """Orders: a request, which is answered with its seconds and the number of tokens."""
    arguments, tiny = pipe.recv()
    if tiny:
        from plugins.sglang.tests.stand_in import Server

        server = Server({"tp_size": 1, **arguments})

        def generate(**request: Any) -> Any:
            return server.generate(request)[1]
    else:
        import sglang

        engine = sglang.Engine(**arguments)
        engine.freeze_gc()  # as CoreRL's side asks its server to
        generate = engine.generate

    def timed_request(request: Mapping[str, Any]) -> tuple[float, int]:
        began = time.perf_counter()
        answers = generate(**request)
        return time.perf_counter() - began, sum(len(each["output_ids"]) for each in answers)

    answer(pipe, {}, timed_request)


SERVERS = {
    "bare": serve_bare,
    "broadcast": serve_broadcast,
    "corerl": serve_corerl,
    "alone": serve_alone,
    "generating": serve_generating,
}

if __name__ == "__main__":
    SERVERS[sys.argv[1]](Client(sys.argv[2]))
