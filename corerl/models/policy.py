"""A causal language model as policy or critic: packed tokens in, per-token log-probs and entropy or values out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.models.build import VALUE_HEAD
from corerl.models.config import longest_sequence
from corerl.models.parts import Head, parts_of
from corerl.models.routing import Routers
from corerl.ops.logprobs import LOGITS, logprobs_of_logits, token_logprobs
from corerl.ops.packing import PackedSequences
from corerl.pictures import Seen, Tower
from corerl.types import Output


class Policy(nn.Module, ABC):
    """Wraps a transformers model as attribute `model`; a critic if it has a value head, else a policy.

    `routers` sets and reads the experts. What lies after the decoder is read but never called as a module, so whatever
    shards the weights must gather `head_parameters` for this module's own forward. Logits exist for as
    many tokens at a time as `token_logprobs` takes, and are computed again in the backward pass. Ids
    from `vocabulary` on count as padding, unless that is 0.
    Of a model that is shown pictures, `tower` encodes them.
    With a `group`, its ranks pass the same tokens and share the rows of the output matrix: rank r replaces the head's
    weight [V, H] by the rows r * n to (r + 1) * n, n = ceil(V / ranks), the last ones padded. All get the same outputs;
    gradients of what comes before the head are whole on every rank, where hidden states are.
    Raises ModelError if nothing in the model turns tokens into hidden states, or these into logits, or if a group is to
    share a head that is more than one matrix.
    """

    rectangular = False  # whether micro-batches are padded, see `ParallelLayout.rectangular`

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocabulary: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        parts = parts_of(model)
        if group is not None and parts.head is not None and parts.head.linear is None:
            raise ModelError(
                f"{type(model).__name__} has more after its decoder than one matrix, so that ranks cannot share its "
                "rows; leave group out, with the whole head on each rank"
            )
        super().__init__()
        self.model = model
        self.group = group
        self.vocabulary = vocabulary or (parts.head.vocab_size if parts.head is not None else 0)
        self.routers = Routers(model)
        self.tower: Tower | None = None  # no module of this one: no pass of the decoder reads its weights
        self._parts = parts  # not modules of this one, or it would have the decoder twice
        self._longest = longest_sequence(model.config)

    @abstractmethod
    def hidden_before(
        self, tokens: Tensor, packing: PackedSequences, positions: Tensor, seen: Seen | None = None
    ) -> Tensor:
        """Hidden states [T - S, H] of the tokens before each token but the first of its sequence."""

    @property
    def decoder(self) -> PreTrainedModel:
        """The part of the model that turns tokens into hidden states."""
        return self._parts.decoder

    @property
    def head(self) -> Head | None:
        """What turns hidden states into logits; None for a critic."""
        return self._parts.head

    @property
    def head_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the forward reads outside of the decoder."""
        if self.head is None:
            return list(self.model.get_submodule(VALUE_HEAD).parameters())
        found = dict(self.model.named_parameters())
        return [found[name] for name in self.head.reads]

    @property
    def value_head(self) -> nn.Linear | None:
        """The module that turns hidden states [T, hidden] into values, if this is a critic."""
        return getattr(self.model, VALUE_HEAD, None)

    def forward(
        self,
        tokens: Tensor,
        packing: PackedSequences,
        positions: Tensor,
        temperature: float,
        outputs: Collection[Output],
        seen: Seen | None = None,
        targets: Tensor | None = None,
    ) -> dict[Output, Tensor]:
        """Compute `outputs`, each [T] float32, for tokens and positions [T] int64; entry t belongs to tokens[t]. `seen`
        are the pictures that the tokens show, from `tower`. With `targets`, [T] or [T, K], log-probs are of them in the
        place of the tokens, and have their shape.

        All are exactly 0 at the first token of each sequence; log-probs and entropy are from logits / temperature.
        """
        critic = self.value_head is not None
        available = {Output.VALUES} if critic else {Output.LOGPROBS, Output.ENTROPY}
        if unknown := set(outputs) - available:
            raise ModelError(
                f"a {'critic' if critic else 'policy'} cannot compute {', '.join(sorted(unknown))}; it computes "
                f"{', '.join(sorted(available))}"
            )
        if self._longest is not None and packing.longest > self._longest:
            raise ModelError(
                f"{type(self.model).__name__} changes the rotary frequencies of all sequences in a pass as soon as "
                f"one has more than {self._longest} tokens, and one has {packing.longest}; use shorter prompts or a "
                "smaller rollout.max_tokens"
            )
        rows = packing.continuations
        fed = tokens if self.tower is None else self.tower.shown(tokens, seen)
        before = self.hidden_before(fed, packing, positions, seen)
        results: dict[Output, Tensor | None] = {}
        if self.value_head is not None:
            results[Output.VALUES] = linear(before.float(), self.value_head.weight.float())[:, 0]
        elif outputs:
            with_entropy = Output.ENTROPY in outputs
            following = (tokens if targets is None else targets).index_select(0, rows)
            scores = self._scores(before, following, temperature, with_entropy=with_entropy)
            results[Output.LOGPROBS], results[Output.ENTROPY] = scores
        return {
            output: values.new_zeros(len(tokens), *values.shape[1:]).index_copy(0, rows, values)
            for output, values in results.items()
            if output in outputs and values is not None
        }

    def _scores(
        self, before: Tensor, targets: Tensor, temperature: float, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of `targets`, [N] or [N, K], after hidden states [N, H], and the entropy [N] or None; float32."""
        head = self.head
        assert head is not None  # a critic has values instead
        if (last := head.linear) is not None:
            return token_logprobs(
                before if self.group is None else _Shared.apply(before, self.group),
                last.weight,
                targets,
                bias=getattr(last, "bias", None),
                temperature=temperature,
                with_entropy=with_entropy,
                group=self.group,
                vocab_size=self.vocabulary,
            )

        def scored(hidden: Tensor, of: Tensor) -> tuple[Tensor, Tensor | None]:
            return logprobs_of_logits(
                head(hidden), of, temperature=temperature, with_entropy=with_entropy, vocab_size=self.vocabulary
            )

        size = max(1, LOGITS[before.device.type] // head.vocab_size)
        parts = [
            checkpoint(scored, hidden, of, use_reentrant=False, preserve_rng_state=False)
            for hidden, of in zip(before.split(size), targets.split(size), strict=True)
        ]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy) if with_entropy else None


class _Shared(torch.autograd.Function):
    """Hidden states that all ranks of a group have: of their gradient each rank's rows of the head give a part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
