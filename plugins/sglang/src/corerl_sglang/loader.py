"""Takes one weight update inside a rank of SGLang's server: bucket by bucket, with checksums, into the rank's model.

SGLang is told of `load` by `--custom-weight-loader`, and calls it in the process of each tensor-parallel rank, in
inference mode, between two batches. The module imports no SGLang: a model is whatever has `load_weights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from corerl.rollout.receiving import Receiving, line
from corerl.weights.manifest import Bucket
from corerl_sglang.instruction import Answer, read_instruction, write_answer


class Model(Protocol):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Takes any part of a checkpoint, under its Hugging Face names; copies what it keeps."""


# By receiver. SGLang calls a function and keeps nothing for it, and connections are to outlive one update.
RECEIVING: dict[int, Receiving] = {}


def load(model: Model, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Never raises where it can tell of an error: an exception here would end the server."""
    ((name, _),) = named_tensors
    instruction, path, rank = read_instruction(name)

    def take(bucket: Bucket, flat: torch.Tensor) -> None:
        model.load_weights(list(bucket.views(flat).items()))

    try:
        receiver = instruction.receivers[rank]
        receiving = RECEIVING.setdefault(receiver, Receiving(receiver))
        received, error = receiving.transfer(instruction.manifest, instruction.version, instruction.address, load=take)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what fails on the device fails here, and not in a later batch
        answer = Answer(bytes=received, error=error)
    except Exception as failure:
        answer = Answer(bytes=0, error=line(failure))
    write_answer(path, rank, answer)
