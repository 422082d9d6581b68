"""A causal language model as policy or critic: packed tokens in, per-token log-probs and entropy or values out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.models.attention import PACKED
from corerl.models.build import VALUE_HEAD
from corerl.models.packable import longest_sequence, require_packable
from corerl.models.routing import Routers
from corerl.ops.attention import PackedSequences
from corerl.ops.logprobs import token_logprobs
from corerl.types import Output


class Policy(nn.Module, ABC):
    """Wraps a transformers model as attribute `model`; a critic if it has a value head, else a policy.

    `routers` sets and reads the experts. What lies after the decoder is read but never called as a module, so whatever
    shards the weights must gather `head_parameters` for this module's own forward.
    """

    rectangular = False  # whether micro-batches are padded, see `ParallelLayout.rectangular`

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.routers = Routers(model)
        self._longest = longest_sequence(model.config)

    @abstractmethod
    def before(self, tokens: Tensor, packing: PackedSequences, positions: Tensor) -> Tensor:
        """Hidden states [T - S, H] of the tokens before each token but the first of its sequence."""

    @abstractmethod
    def score(
        self, before: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] of `targets` [N] after hidden states [N, H], and the entropy [N] or None; both float32."""

    @property
    @abstractmethod
    def head_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the forward reads outside of the decoder."""

    @property
    def value_head(self) -> nn.Linear | None:
        """The module that turns hidden states [T, hidden] into values, if this is a critic."""
        return getattr(self.model, VALUE_HEAD, None)

    @property
    def gives(self) -> frozenset[Output]:
        """The outputs that `forward` can compute."""
        if self.value_head is not None:
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
        rows = packing.continuations
        before = self.before(tokens, packing, positions)
        results: dict[Output, Tensor | None] = {}
        if self.value_head is not None:
            results[Output.VALUES] = linear(before.float(), self.value_head.weight.float())[:, 0]
        elif outputs:
            results[Output.LOGPROBS], results[Output.ENTROPY] = self.score(
                before,
                tokens.index_select(0, rows),
                temperature=temperature,
                with_entropy=Output.ENTROPY in outputs,
            )
        return {
            output: torch.zeros(len(tokens), dtype=values.dtype, device=values.device).index_copy(0, rows, values)
            for output, values in results.items()
            if output in outputs and values is not None
        }


class CausalPolicy(Policy):
    """A policy that passes packed sequences through the decoder of a model from `build_on_meta(..., attention=PACKED)`
    and multiplies by the head's weight. Raises ModelError if the model does something that this would leave out."""

    def __init__(self, model: PreTrainedModel) -> None:
        require_packable(model)
        if (attention := model.config._attn_implementation) != PACKED:
            raise ModelError(f"{type(model).__name__} was built with {attention!r} attention, expected {PACKED!r}")
        super().__init__(model)

    @property
    def head(self) -> nn.Linear:
        """The module that turns hidden states [T, hidden] into logits or values."""
        return self.model.get_output_embeddings() if self.value_head is None else self.value_head

    @property
    def head_parameters(self) -> Sequence[nn.Parameter]:
        return list(self.head.parameters(recurse=False))

    def before(self, tokens: Tensor, packing: PackedSequences, positions: Tensor) -> Tensor:
        trunk = self.model.get_decoder()
        hidden: Tensor = trunk(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        return hidden.index_select(0, packing.continuations - 1)

    def score(
        self, before: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(
            before,
            self.head.weight,
            targets,
            bias=getattr(self.head, "bias", None),
            temperature=temperature,
            with_entropy=with_entropy,
        )
