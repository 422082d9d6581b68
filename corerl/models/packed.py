"""Run a causal language model on packed sequences, which attention keeps apart."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.models.attention import PACKED
from corerl.models.mixers import keep_apart
from corerl.models.packable import packed_call, require_packable
from corerl.models.policy import Policy
from corerl.ops.attention import PackedSequences


class PackedPolicy(Policy):
    """A policy that passes packed sequences through the decoder of a model from `build_on_meta(..., attention=PACKED)`.
    Raises ModelError if the model cannot be packed."""

    def __init__(self, model: PreTrainedModel, *, vocabulary: int = 0, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(model, vocabulary=vocabulary, group=group)
        require_packable(model, self.decoder)
        if (attention := model.config._attn_implementation) != PACKED:
            raise ModelError(f"{type(model).__name__} was built with {attention!r} attention, expected {PACKED!r}")
        # The rows of layers with a state are padded, in whatever order the sequences are.
        self.rectangular = bool(keep_apart(self.decoder))

    def before(self, tokens: Tensor, packing: PackedSequences, positions: Tensor) -> Tensor:
        hidden: Tensor = self.decoder(**packed_call(tokens, positions, packing)).last_hidden_state[0]
        return hidden.index_select(0, packing.continuations - 1)
