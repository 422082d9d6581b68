"""Run a causal language model as its authors wrote it, on padded rows, with the same call as for packed sequences."""

from __future__ import annotations

from torch import Tensor

from corerl.models.policy import Policy
from corerl.ops.attention import PackedSequences


class WholePolicy(Policy):
    """A policy that passes right-padded rows through the decoder of a model with an attention of transformers.

    A micro-batch is one call of the decoder, however many tokens it has: ranks that gather weights together call it
    equally often.
    """

    rectangular = True

    def before(self, tokens: Tensor, packing: PackedSequences, positions: Tensor) -> Tensor:
        rows, gather, scatter = packing.rows
        self.routers.laid_out(gather, scatter)
        # Padding is on the right, where no real token sees it: no mask is needed, and attention without one is faster.
        cells = self.decoder(input_ids=tokens[gather].view(*rows.shapes[0]), use_cache=False).last_hidden_state
        hidden: Tensor = cells.flatten(0, 1).index_select(0, scatter[packing.continuations - 1])
        return hidden
