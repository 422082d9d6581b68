"""Inside a rank of SGLang's server: load weight updates, bucket by bucket, and report what the model holds.

SGLang gets `load` as `--custom-weight-loader`, and calls it in the process of each tensor-parallel rank, in inference
mode, between two batches. This module does not import SGLang: a model is anything with `load_weights`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from corerl.engines import Receiving
from corerl.errors import WeightUpdateError
from corerl.messages import message_of
from corerl.weights import Bucket, CudaPinning
from corerl_sglang.adapters import Packed
from corerl_sglang.held import Held, Model
from corerl_sglang.instruction import Answer, Instruction, read_instruction, write_answer

# By receiver and by model id. Globals, since SGLang just calls a function, and connections must outlive an update.
RECEIVING: dict[int, Receiving] = {}
HELD: dict[int, Held] = {}
# By path and inode: files that are written again and again, which stay mapped, and how they are pinned.
MAPPED: dict[tuple[str, int], tuple[torch.Tensor, CudaPinning | None]] = {}


def load(model: Model, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Follow one instruction and write the answer. Errors go into the answer: an exception would end the server."""
    ((name, _),) = named_tensors
    asked, path, rank = read_instruction(name)
    held = HELD.setdefault(id(model), Held(model))
    try:
        if isinstance(asked, Instruction):
            answer = _update(held, asked, rank)
        else:
            answer = Answer(bytes=0, error="", sums=held.sums())
    except Exception as failure:
        answer = Answer(bytes=0, error=message_of(failure))
    write_answer(path, rank, answer)


def _mapped(path: str, nbytes: int) -> torch.Tensor:
    """The file's bytes, pinned where there is a GPU: all adapters are then one copy at full speed."""
    if known := MAPPED.get((path, _inode(path))):
        return known[0]
    for gone in [(other, inode) for other, inode in MAPPED if _inode(other) != inode]:
        memory, pinning = MAPPED.pop(gone)
        if pinning is not None:
            pinning.unpin(memory)
    memory, pinning = torch.from_file(path, True, nbytes, dtype=torch.uint8), None
    if torch.cuda.is_available():
        pinning = CudaPinning(torch.device("cuda", torch.cuda.current_device()))
        if pinning.pin_apart(memory):  # it is refused: copies are only slower
            pinning = None
    MAPPED[path, _inode(path)] = memory, pinning
    return memory


def _inode(path: str) -> int:
    """Of the file at this path, which may come to be another one; 0 if there is none."""
    return os.stat(path).st_ino if os.path.exists(path) else 0


def _update(held: Held, instruction: Instruction, rank: int) -> Answer:
    receiver = instruction.receivers[rank]
    receiving = RECEIVING.setdefault(receiver, Receiving(receiver))
    # Whole on every rank, and SGLang cuts them itself: one rank writes them for all.
    writes = bool(instruction.adapters) and rank == 0
    room: dict[str, torch.Tensor] = {}

    def take(bucket: Bucket, flat: torch.Tensor) -> None:
        if writes and not room:
            room.update(_room(instruction))
        for name, tensor in bucket.views(flat).items():
            if name in room:
                room[name].copy_(tensor, non_blocking=True)
        held.load(bucket, flat)

    received = receiving.transfer(instruction.manifest, instruction.version, instruction.address, load=take)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # let device errors surface here, not in a later batch
    return Answer(bytes=received, error="")


def _room(instruction: Instruction) -> dict[str, torch.Tensor]:
    """Where to write each adapter. Made while the update arrives, so that the sender notices if it cannot be."""
    packed = Packed.of(instruction.manifest)
    try:
        return packed.views(_mapped(instruction.adapters, packed.nbytes))
    except (OSError, RuntimeError) as failure:
        raise WeightUpdateError(f"no memory for adapters: {message_of(failure)}") from failure
