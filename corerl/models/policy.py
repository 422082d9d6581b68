"""A causal language model as policy or critic: packed tokens in, per-token log-probs and entropy or values out."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.models.attention import PACKED
from corerl.models.build import VALUE_HEAD
from corerl.models.packable import longest_sequence, require_packable
from corerl.models.routing import Routers
from corerl.ops.attention import PackedSequences
from corerl.ops.logprobs import token_logprobs
from corerl.types import Output


class CausalPolicy(nn.Module):
    """Wraps a model from `build_on_meta(..., attention=PACKED)` as attribute `model`; a critic if it has a value head,
    else a policy.

    The head's weight is read but the head is never called, so whatever shards the weights must gather it for this
    module's own forward. `routers` sets and reads the experts. Raises ModelError if the model does something that this
    forward would leave out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        require_packable(model)
        if (attention := model.config._attn_implementation) != PACKED:
            raise ModelError(f"{type(model).__name__} was built with {attention!r} attention, expected {PACKED!r}")
        self.model = model
        self.routers = Routers(model)
        self._longest = longest_sequence(model.config)

    @property
    def head(self) -> nn.Linear:
        """The module that turns hidden states [T, hidden] into logits or values."""
        value_head: nn.Linear | None = getattr(self.model, VALUE_HEAD, None)
        return self.model.get_output_embeddings() if value_head is None else value_head

    @property
    def gives(self) -> frozenset[Output]:
        """The outputs that `forward` can compute."""
        if hasattr(self.model, VALUE_HEAD):
            return frozenset({Output.VALUES})
        return frozenset({Output.LOGPROBS, Output.ENTROPY})

    def forward(
        self,
        tokens: Tensor,
        packing: PackedSequences,
        positions: Tensor,
        temperature: float,
        outputs: Collection[Output],
    ) -> dict[Output, Tensor]:
        """Compute `outputs`, each [T] float32, for tokens and positions [T] int64; entry t belongs to tokens[t].

        All are exactly 0 at the first token of each sequence; log-probs and entropy are from logits / temperature.
        """
        unknown = set(outputs) - self.gives
        if unknown:
            what = "critic" if Output.VALUES in self.gives else "policy"
            raise ModelError(
                f"a {what} cannot compute {', '.join(sorted(unknown))}; it computes {', '.join(sorted(self.gives))}"
            )
        if self._longest is not None and packing.longest > self._longest:
            raise ModelError(
                f"{type(self.model).__name__} changes the rotary frequencies of all sequences in a pass as soon as "
                f"one has more than {self._longest} tokens, and one has {packing.longest}; use shorter prompts or a "
                "smaller rollout.max_tokens"
            )
        trunk = self.model.get_decoder()
        hidden = trunk(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        rows = packing.continuations
        before = hidden.index_select(0, rows - 1)  # a token is predicted, and valued, at the token before it
        results: dict[Output, Tensor | None] = {}
        if Output.VALUES in outputs:
            results[Output.VALUES] = torch.nn.functional.linear(before.float(), self.head.weight.float())[:, 0]
        if Output.LOGPROBS in outputs or Output.ENTROPY in outputs:
            results[Output.LOGPROBS], results[Output.ENTROPY] = token_logprobs(
                before,
                self.head.weight,
                tokens.index_select(0, rows),
                bias=getattr(self.head, "bias", None),
                temperature=temperature,
                with_entropy=Output.ENTROPY in outputs,
            )
        return {
            output: torch.zeros(len(tokens), dtype=values.dtype, device=values.device).index_copy(0, rows, values)
            for output, values in results.items()
            if output in outputs and values is not None
        }
