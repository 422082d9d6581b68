"""An engine in a process of its own, for the transport tests: `python peer.py ADDRESS_JSON INDEX`, orders on stdin.

Each order is one JSON line {"version", "shapes", "bucket_bytes", "senders", "act"}; each answer one JSON line
{"version", "error", "sums"}. `version` is the engine's own after the update, `sums` the loaded tensors' sums of bits.
Acts: load (a whole update), refuse (say no before reading), fail (raise while loading the first bucket), die (vanish
after the first bucket), stop (hang after the first bucket, as a peer that NCCL has lost).
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from corerl.errors import WeightUpdateError
from corerl.plugin.transports import open_receiver
from corerl.weights.manifest import build_manifest
from corerl.weights.transport import Address


def bit_sum(tensor: torch.Tensor) -> int:
    """The sum of the elements' bit patterns, independent of the transports' own checksum."""
    return int(tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).sum().item())


def main() -> None:
    torch.set_num_threads(1)
    receiver = open_receiver(Address(**json.loads(sys.argv[1])), index=int(sys.argv[2]))
    version = 0
    loaded: dict[str, torch.Tensor] = {}
    print(json.dumps({"started": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        manifest = build_manifest(
            [(name, tuple(shape)) for name, shape in order["shapes"]],
            dtype=order["dtype"],
            bucket_bytes=order["bucket_bytes"],
            senders=order["senders"],
        )
        error = ""
        fresh: dict[str, torch.Tensor] = {}
        try:
            if order["act"] == "refuse":
                raise WeightUpdateError("this engine does not want it")
            for bucket, flat in receiver.buckets(manifest, order["version"]):
                if order["act"] == "fail":
                    raise WeightUpdateError("this engine cannot load it")
                if order["act"] == "die":
                    os._exit(1)
                if order["act"] == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                fresh |= {name: tensor.clone() for name, tensor in bucket.views(flat).items()}
                del flat  # the sender takes its memory back
            loaded, version = fresh, order["version"]
        except WeightUpdateError as failure:
            error = failure.message
        receiver.acknowledge(order["version"], error)
        sums = {name: bit_sum(tensor) for name, tensor in loaded.items()}
        print(json.dumps({"version": version, "error": error, "sums": sums}), flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
