"""An engine in a process of its own: `python peer.py ADDRESS_JSON INDEX small|large ACT...`, an act for each update.

Acts: load, die (end at the first bucket). After each update it prints a JSON line: {"error": ..., "sums": by tensor}.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from corerl.engines.lifecycle import Receiving
from corerl.errors import WeightUpdateError
from corerl.weights.checksums import bit_sums
from corerl.weights.manifest import Bucket
from corerl.weights.transport import Address
from tests.weights.ends import LARGE, MANIFEST


def main() -> None:
    torch.set_num_threads(1)
    address, index, size, *acts = Address(**json.loads(sys.argv[1])), int(sys.argv[2]), *sys.argv[3:]
    receiving = Receiving(index)
    for version, act in enumerate(acts, start=1):
        sums: dict[str, int] = {}
        error = ""

        def load(bucket: Bucket, flat: torch.Tensor, act: str = act, sums: dict[str, int] = sums) -> None:
            if act == "die":
                os._exit(1)
            sums |= bit_sums(bucket.views(flat))

        try:
            receiving.transfer(LARGE if size == "large" else MANIFEST, version, address, load=load)
        except WeightUpdateError as failure:
            error = failure.message
        print(json.dumps({"error": error, "sums": sums}), flush=True)
    receiving.close()


if __name__ == "__main__":
    main()
