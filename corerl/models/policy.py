"""A causal language model as policy or critic: packed tokens in; per token log-prob and entropy, or a value, out."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.errors import ModelError
from corerl.models.attention import PACKED
from corerl.models.build import VALUE_HEAD
from corerl.models.routing import Routers
from corerl.ops.attention import PackedSequences
from corerl.ops.logprobs import token_logprobs
from corerl.types import Output

# Configs whose models do more between hidden states and logits than multiply by the head's weight.
SCALINGS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)


class CausalPolicy(nn.Module):
    """Wraps the model that `build_on_meta(..., attention=PACKED)` makes, as attribute `model`; a critic where it has a
    value head, else a policy.

    The head is not called: its weight is read, so whatever shards the weights must gather it for this module's own
    forward. Experts are told and read through `routers`. Raises ModelError where the model changes its logits in a way
    that this would leave out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config: PreTrainedConfig = model.config
        name = type(model).__name__
        for scaling in SCALINGS:
            value = getattr(config, scaling, None)
            if value is not None and value != 1.0:
                raise ModelError(f"{name} changes its logits by {scaling}={value}, which CoreRL does not support")
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if kinds:
            raise ModelError(f"{name} has layers of {', '.join(sorted(kinds))}; CoreRL packs full attention only")
        if config._attn_implementation != PACKED:
            raise ModelError(f"{name} was built with {config._attn_implementation!r} attention, wanted {PACKED!r}")
        self.model = model
        self.routers = Routers(model)

    @property
    def head(self) -> nn.Linear:
        """What turns hidden states [T, hidden] into logits, or into values."""
        value_head: nn.Linear | None = getattr(self.model, VALUE_HEAD, None)
        return self.model.get_output_embeddings() if value_head is None else value_head

    @property
    def gives(self) -> frozenset[Output]:
        """The outputs that `forward` can be asked for."""
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
        """tokens and positions [T] int64; each output is [T] float32, entry t speaks of tokens[t].

        What `outputs` asks for, exactly 0 at the first token of each sequence; log-probs and entropy from
        logits / temperature.
        """
        unknown = set(outputs) - self.gives
        if unknown:
            what = "critic" if Output.VALUES in self.gives else "policy"
            raise ModelError(f"a {what} has no {', '.join(sorted(unknown))}; it gives {', '.join(sorted(self.gives))}")
        trunk = self.model.get_decoder()
        hidden = trunk(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        rows = packing.continuations
        before = hidden.index_select(0, rows - 1)  # a token is predicted, and valued, where the one before it was read
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
