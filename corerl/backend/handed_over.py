"""What a rank goes on from: a checkpoint's state, or the state that other ranks hand over."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from safetensors.torch import load, save

from corerl.checkpoint.reader import revived
from corerl.checkpoint.writer import plain
from corerl.weights.chunks import Chunk
from corerl.weights.handover import Handover, Taken

SNAPSHOT = "snapshot/"  # before the name of one, as a kind of state


class TrainingState(Protocol):
    """Training state to go on from, as one rank sees it; `str` says which it is."""

    @property
    def snapshots(self) -> Sequence[str]:
        """The names of snapshots that are part of it."""

    def extra(self, rank: int) -> Mapping[str, Any]:
        """What the rank that had this number kept besides tensors."""

    def take(self, kind: str, chunks: Sequence[Chunk]) -> None:
        """Fill the chunks with the state of a kind: `master` with buffers, `exp_avg`, `exp_avg_sq`, then snapshots."""

    def require_taken(self, names: Collection[str]) -> None:
        """Raise if there are other weights than these."""

    def close(self) -> None:
        """Called once all has been taken."""


class HandedOver:
    """The state of other ranks, which give it meanwhile."""

    def __init__(self, handover: Handover, rank: int) -> None:
        self._taken = Taken(handover, rank)

    def __str__(self) -> str:
        return f"the state of {self._taken.handover.givers} other ranks"

    @property
    def snapshots(self) -> Sequence[str]:
        return [kind.removeprefix(SNAPSHOT) for kind in self._taken.kinds if kind.startswith(SNAPSHOT)]

    def extra(self, rank: int) -> dict[str, Any]:
        return from_text(self._taken.note(rank))

    def take(self, kind: str, chunks: Sequence[Chunk]) -> None:
        self._taken.take(kind, chunks)

    def require_taken(self, names: Collection[str]) -> None:
        """Nothing to do: what is not taken has been refused."""

    def close(self) -> None:
        self._taken.close()


def to_text(extra: Mapping[str, Any]) -> str:
    """Mappings, sequences, tensors and plain values as text. Raises SaveFailed for a value that JSON cannot hold."""
    tensors: dict[str, torch.Tensor] = {}
    content = plain(extra, tensors, "extra")
    return json.dumps({"extra": content, "tensors": base64.b64encode(save(tensors)).decode()})


def from_text(text: str) -> dict[str, Any]:
    content = json.loads(text)
    tensors = load(base64.b64decode(content["tensors"]))
    extra: dict[str, Any] = revived(content["extra"], tensors.__getitem__)
    return extra
