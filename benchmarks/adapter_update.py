"""What an update of adapters alone costs with SGLang, against SGLang's own load of the same adapters.

python -m benchmarks.adapter_update                # the 8B shape, rank 32, on one GPU
python -m benchmarks.adapter_update --tiny         # on a CPU, with a stand-in: does it run?

One process is the trainer and CoreRL's SGLang engine, which starts a server. An update is timed as in a run, from the
first bucket that is sent by CUDA IPC until the server has the adapters and the engine has said so: the rendezvous, a
checksum on each side, the copy to host memory that the server maps, and its load. The other side is the load alone, in
the same server: one call with a handle of the flattened adapters, ready on the GPU. SGLang takes a name once, so each
side has names of its own, and earlier ones are unloaded: by an update within its time, by the other side outside it.
"""

from __future__ import annotations

import argparse
import base64
import os
import pickle
import threading
import time
import uuid
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from attrs import evolve

from benchmarks.report import Comparison, Number, Report, finish, in_turns
from benchmarks.sglang_sides import Replica
from benchmarks.steps import QWEN3_8B, TINY
from corerl.config import LoraConfig, ModelConfig
from corerl.models import hf_config, look_at, peft_config, shapes_of
from corerl.plugin.transports import open_sender
from corerl.weights import Address, build_manifest, is_adapter
from corerl_sglang.adapters import modules_of
from corerl_sglang.engine import SglangEngine

LIMIT = 1.3  # times SGLang's own load
RANK = 32
BUCKET_BYTES = 512 * 2**20
TIMEOUT = 300.0  # seconds that one side of an update waits for the other


class Sides:
    """An engine with a server that has all weights, and adapters to load into it."""

    def __init__(self, *, tiny: bool) -> None:
        self._tiny = tiny
        self._device = torch.device("cpu" if tiny else "cuda")
        shape: Mapping[str, Any] = {**QWEN3_8B, **TINY} if tiny else QWEN3_8B
        fields = {**shape, "pad_token_id": 0, "max_position_embeddings": 4096}
        model = ModelConfig(config=fields)
        self._lora = LoraConfig(rank=RANK).settled({})
        replica = Replica(fields=fields, index=0, gpus=1, devices=(), tiny=tiny)
        self.engine = SglangEngine(model, replica.options, evolve(replica.context, lora=self._lora))
        address = Address(
            transport="ipc",
            engines=("engine-0",),
            token=uuid.uuid4().hex,
            senders=(0,),
            device=self._device.type,
            timeout=TIMEOUT,
        )
        self._address, self._sender = address, open_sender(address)
        self._shapes = shapes_of(look_at(hf_config(model), lora=self._lora))
        generator = torch.Generator(self._device).manual_seed(0)
        self.adapters = {
            name: torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
            for name, shape in self._shapes.items()
            if is_adapter(name)
        }
        self._version = self._named = 0

    def whole(self) -> None:
        """The first update, of weights too: zeros, whose values do not matter here."""
        self._update({name: self.adapters.get(name) for name in self._shapes})

    def update(self, number: int) -> float:
        return self._update(self.adapters)

    def _update(self, tensors: Mapping[str, torch.Tensor | None]) -> float:
        shapes = [(name, self._shapes[name]) for name in tensors]
        manifest = build_manifest(shapes, dtype="bfloat16", bucket_bytes=BUCKET_BYTES)
        self._version += 1
        version, received = self._version, []
        self._synchronize()
        began = time.perf_counter()
        thread = threading.Thread(target=lambda: received.append(self.engine.receive(manifest, version, self._address)))
        thread.start()
        self._sender.open(manifest, version)
        for bucket in manifest.buckets:
            room = self._sender.acquire_buffer(bucket.numel, torch.bfloat16)
            if room is None:
                room = torch.empty(bucket.numel, dtype=torch.bfloat16, device=self._device)
            for name, view in bucket.views(room).items():
                tensor = tensors[name]
                if tensor is None:
                    view.zero_()
                else:
                    view.copy_(tensor)
            self._sender.send(bucket, room)
        told = self._sender.finish()
        thread.join()
        took = time.perf_counter() - began
        errors = [received[0].error, *told.values()]
        assert not any(errors), errors
        return took

    def load(self, number: int) -> float:
        """SGLang's own."""
        ready, form = self._ready()
        self._named += 1
        name = f"own-{self._named}"
        config = peft_config(self._lora, base="", targets=modules_of(self.adapters))
        self._synchronize()
        began = time.perf_counter()
        # A pickle of handles; on a CPU, where these would be file descriptors, of the bytes themselves.
        pickled = pickle.dumps(ready) if self._tiny else bytes(ForkingPickler.dumps(ready))
        payload = base64.b64encode(pickled).decode()
        body = {"lora_name": name, "config_dict": config, "serialized_named_tensors": [payload], **form}
        self.engine._server.post("/load_lora_adapter_from_tensors", body)
        took = time.perf_counter() - began
        self.engine._server.post("/unload_lora_adapter", {"lora_name": name})
        return took

    def _ready(self) -> tuple[Any, dict[str, str]]:
        """What SGLang is handed, with the words that tell its form; the stand-in takes tensors by name."""
        if self._tiny:
            return self.adapters, {}
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=list(self.adapters.items()))
        ready = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        return ready, {"load_format": "flattened_bucket"}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._sender.close()
        self.engine.close()


def measure(*, rounds: int, tiny: bool) -> Report:
    """Two rounds warm up."""
    sides = Sides(tiny=tiny)
    try:
        sides.whole()
        in_turns(2, sides.update, sides.load)
        ours, other = in_turns(rounds, sides.update, sides.load)
    finally:
        sides.close()
    size = sum(tensor.nbytes for tensor in sides.adapters.values())
    what = "a small model" if tiny else "the Qwen3-8B shape"
    return Report(
        name="adapter update",
        size=f"{what}, adapters of rank {RANK} on all linear layers, bfloat16",
        comparisons=[
            Comparison(
                what="an update of adapters alone, until the server has them",
                against=f"{'the stand-in' if tiny else 'SGLang'}'s own load of them",
                ours=ours,
                other=other,
                target=LIMIT,
            )
        ],
        numbers=[Number(what="sent", values=[size / 2**20], unit="MiB")],
        note="An update has four more calls of the server, and unloads an earlier version.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measured updates of each side, in turns (default: 10)")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, with a stand-in for SGLang")
    parser.add_argument("--output", help="a JSON file; without it a table is printed")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    finish(measure(rounds=args.rounds, tiny=args.tiny), args.output)


if __name__ == "__main__":
    main()
