"""What memory is for, and how large a model is. Imports nothing heavy, since specs need it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from attrs import frozen


class MemoryKind(StrEnum):
    """What a backend's memory is for: the unit of `sleep` and `wake_up`."""

    PARAM = "param"  # what forward and update_weights read
    MASTER = "master"  # float32 copies of the parameters, if separate
    GRAD = "grad"  # dropped on sleep, never copied
    OPTIMIZER = "optimizer"  # moments


ALL_KINDS = frozenset(MemoryKind)


class InPieces(StrEnum):
    """Why packed attention of a model is more than one kernel, also in half precision on a GPU."""

    HEADS = "its heads have more than 256 elements"
    SINKS = "it has sinks"
    CAPS = "it caps its scores"
    STATE = "some layers carry a state along a row"
    OWN = "it is the model's own code"  # for which sequences are not packed


@frozen(kw_only=True)
class ModelSize:
    """How many elements a model's weights have, before any of them is split."""

    layers: tuple[int, ...]  # of each decoder layer, its experts included
    experts: tuple[int, ...]  # of each decoder layer's experts; 0 in a dense one
    embedding: int
    head: int  # what turns hidden states into logits or a value; 0 if it is the embedding
    rest: int  # all others, such as the final norm
    hidden: int  # elements of a hidden state
    adapters: int = 0  # of a role that trains these: they, and a value head; the other fields count all but these
    in_pieces: InPieces | None = None  # None: packed attention is one kernel, in half precision on a GPU

    @property
    def total(self) -> int:
        return sum(self.layers) + self.embedding + self.head + self.rest

    @property
    def trained(self) -> int:
        """Of what is trained."""
        return self.adapters or self.total


# Model families use different names, and transformers 5.15 and later write Qwen3-MoE's "num_experts" as the second.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts_of(fields: Mapping[str, Any]) -> int:
    """The number of experts that a layer of the text decoder chooses from; 0 for a dense model. `fields` are those of
    `config.to_dict()` or config.json."""
    parts = (fields, fields.get("text_config"), fields.get("ffn_config"))  # the last is DBRX's
    counts = (part.get(name) for part in parts if isinstance(part, Mapping) for name in EXPERT_COUNTS)
    return max((count for count in counts if isinstance(count, int)), default=0)  # of another type: it is not built
