"""Two processes with a model in SGLang: one takes updates through CoreRL's engine, the other loads with SGLang alone.

The first is `SglangEngine` with the server that it starts, as in a run. The second is `sglang.Engine`, which is passed
flattened buckets that are already on its GPUs: `update_weights_from_tensor(..., load_format="flattened_bucket")`, with
the same tensors in the same order and buckets. Its call does not wait for the copies on the device; CoreRL's does. Both
have the same server arguments. On a CPU a stand-in replaces SGLang on both sides.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from benchmarks.runs import SERVER
from benchmarks.steps import QuickWeights
from corerl.config.schema import ModelConfig
from corerl.engines.base import EngineContext
from corerl.models.config import hf_config
from corerl.weights.manifest import Manifest
from corerl.weights.verify import bit_sums
from corerl_sglang.arguments import server_arguments
from corerl_sglang.config import SglangConfig
from corerl_sglang.engine import SglangEngine

STAND_IN = "plugins.sglang.tests.stand_in"
TELLER = "benchmarks.sglang_sides.tell_totals"  # how SGLang names a function
# Nothing is generated here: a small KV cache and few graphs leave the GPU to weights.
SMALL = {**SERVER, "cuda_graph_max_bs_decode": 8, "max_total_tokens": 2**15}
OWN = ("custom_weight_loader", "enable_memory_saver")  # arguments that SGLang alone has no use for
START_SECONDS = 500.0


@frozen(kw_only=True)
class Replica:
    """One engine, as either side starts it."""

    fields: Mapping[str, Any]  # of the model's config
    index: int  # among the engines
    gpus: int  # that it is split over
    devices: tuple[str, ...]  # their numbers; empty takes the first that its process sees
    tiny: bool  # on a CPU, with a stand-in

    @property
    def options(self) -> SglangConfig:
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
        return EngineContext(
            name=f"engine-{self.index}",
            index=self.index,
            device="cpu" if self.tiny else "cuda",
            precision="bfloat16",
            bundles=self.gpus,
            devices=self.devices,
        )

    @property
    def environment(self) -> dict[str, str]:
        """For a process that sees no other GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}


# ---- CoreRL's engine -------------------------------------------------------------------------------------------------


def serve_corerl(pipe: Connection) -> None:
    """Is told the replica, and where weights come from; then takes the version that it is told, until it is told None.
    Asked for "sums", it tells those of the bits that it holds, by tensor."""
    replica, manifest, address = pipe.recv()
    engine = SglangEngine(ModelConfig(config=dict(replica.fields)), replica.options, replica.context)
    try:
        pipe.send("there")
        while (order := pipe.recv()) is not None:
            if order == "sums":
                pipe.send(engine.weight_sums(manifest.dtype))
            else:
                pipe.send(engine.receive(manifest, order, address).error)
    finally:
        engine.close()


# ---- SGLang alone ----------------------------------------------------------------------------------------------------


def serve_alone(pipe: Connection) -> None:
    """Is told the replica and the manifest, and then answers "load" with its seconds until it is told None. Asked for
    "held", it says how what it holds differs from its buckets: "" where it does not."""
    replica, manifest, _ = pipe.recv()
    with tempfile.TemporaryDirectory(prefix="update-") as directory:
        side = (StandIn if replica.tiny else Alone)(replica, manifest, Path(directory))
        pipe.send("there")
        while (order := pipe.recv()) is not None:
            if order == "held":
                pipe.send(side.difference())
                continue
            began = time.perf_counter()
            side.load()
            pipe.send(time.perf_counter() - began)
        side.close()


def arguments_of(replica: Replica, directory: Path) -> dict[str, Any]:
    """The server's arguments, as CoreRL's engine makes them."""
    model = hf_config(ModelConfig(config=dict(replica.fields)))
    model.eos_token_id = None
    model.save_pretrained(directory / "model")
    arguments = server_arguments(replica.options, replica.context, model=directory / "model")
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


class Alone:
    """SGLang's own engine, and buckets on each of its GPUs."""

    def __init__(self, replica: Replica, manifest: Manifest, directory: Path) -> None:
        import sglang
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        self._directory = directory
        self._serialize = MultiprocessingSerializer.serialize
        self._engine: Any = sglang.Engine(
            **arguments_of(replica, directory), custom_weight_loader=[TELLER], log_level="error"
        )
        self._ready: list[list[dict[str, Any]]] = []  # by bucket, by tensor-parallel rank
        self._sent = Totals(cut=0, whole=0)
        for tensors in filled(manifest, torch.device("cuda", 0)):
            self._sent = self._sent.plus(Totals.of(tensors))
            bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
            flat, metadata = bucket.get_flattened_tensor(), bucket.get_metadata()
            self._ready.append(
                [{"flattened_tensor": flat.to(f"cuda:{rank}"), "metadata": metadata} for rank in range(replica.gpus)]
            )
        torch.cuda.empty_cache()  # what drawing them has taken is the others'
        for rank in range(replica.gpus):
            torch.cuda.synchronize(rank)

    def load(self) -> None:
        for number, ranks in enumerate(self._ready):
            # Anew each time: what is serialized is a handle, and whoever opens it gives it back.
            handed = [self._serialize(each) for each in ranks]
            last = number == len(self._ready) - 1
            done, message = self._engine.update_weights_from_tensor(
                handed, load_format="flattened_bucket", flush_cache=last
            )
            if not done:
                raise RuntimeError(f"SGLang did not load bucket {number}: {message}")

    def difference(self) -> str:
        """Norms lie whole on each rank, and of all else each rank has a part."""
        asked = [(str(self._directory / "totals"), torch.empty(0))]
        self._engine.update_weights_from_tensor(asked, load_format=TELLER, flush_cache=False)
        ranks = [Totals(**json.loads(file.read_text())) for file in self._directory.glob("totals-*")]
        cut = signed(sum(each.cut for each in ranks))
        if ranks and cut == self._sent.cut and {each.whole for each in ranks} == {self._sent.whole}:
            return ""
        return f"SGLang alone has {ranks}, and was handed {self._sent}"

    def close(self) -> None:
        self._engine.shutdown()


@frozen(kw_only=True)
class Totals:
    """What the bits of many tensors sum to, as `bit_sums` has it of each."""

    cut: int  # of those with two axes or more, which are split over ranks
    whole: int  # of the others

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Totals:
        sums = bit_sums(tensors)
        cut = sum(each for name, each in sums.items() if tensors[name].ndim > 1)
        return cls(cut=signed(cut), whole=signed(sum(sums.values()) - cut))

    def plus(self, other: Totals) -> Totals:
        return Totals(cut=signed(self.cut + other.cut), whole=signed(self.whole + other.whole))


def signed(number: int) -> int:
    """Modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63


def tell_totals(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang in the process of each rank: the one name says where to write what its model holds."""
    ((path, _),) = named_tensors
    totals = Totals.of(dict(model.named_parameters()))
    Path(f"{path}-{dist.get_rank()}").write_text(json.dumps({"cut": totals.cut, "whole": totals.whole}))


class StandIn:
    """Where no SGLang is: the stand-in's own load, of one rank with the whole model."""

    def __init__(self, replica: Replica, manifest: Manifest, directory: Path) -> None:
        from plugins.sglang.tests.stand_in import Server

        (self._rank,) = Server({**arguments_of(replica, directory), "tp_size": 1}).ranks
        self._ready = list(filled(manifest, torch.device("cpu")))

    def load(self) -> None:
        with torch.inference_mode():
            for tensors in self._ready:
                self._rank.load_weights(tensors.items())

    def difference(self) -> str:
        sent = {name: tensor for tensors in self._ready for name, tensor in tensors.items()}
        held, wanted = Totals.of(dict(self._rank.named_parameters())), Totals.of(sent)
        return "" if held == wanted else f"the stand-in has {held}, and was handed {wanted}"

    def close(self) -> None:
        pass  # it is this process


def differences(sent: Mapping[str, int], held: Mapping[str, int] | None) -> str:
    """Of CoreRL's engine: "" where it tells of every tensor, and each has the bits that were sent."""
    told = held or {}
    wrong = [name for name in sent if told.get(name) != sent[name]]
    return f"CoreRL's engine holds {len(wrong)} of {len(sent)} tensors otherwise, or does not tell" if wrong else ""


if __name__ == "__main__":
    {"corerl": serve_corerl, "alone": serve_alone}[sys.argv[1]](Client(sys.argv[2]))
