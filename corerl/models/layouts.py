"""A causal language model as policy or critic, packed tokens in, per-token log-probs and entropy or values out: by one
of two ways through the model, packed sequences or the whole model on padded rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models.attention import (
    PACKED,
    mixers,
    other_mixers,
    register_packed_attention,
    require_packable,
    run_on_rows,
)
from corerl.models.build import VALUE_HEAD, VALUE_HEAD_WEIGHT, build_on_meta, build_tower, own_attention
from corerl.models.config import context_length, longest_sequence, reads_pictures
from corerl.models.files import meta_model
from corerl.models.parts import Head, Parts, Reads, parts_of, sees_both_ways
from corerl.models.routing import Routers
from corerl.ops.logprobs import LOGITS, logprobs_of_logits, token_logprobs
from corerl.ops.packing import PackedSequences
from corerl.pictures import PictureInputs, Seen, Tower
from corerl.types import Output


@frozen
class Layout:
    name: Literal["packed", "whole"]
    why: str = ""  # whole, though it was not asked for: what keeps the model from being packed


def choose_layout(model: PreTrainedModel, asked: str, *, pictures: bool = False) -> Layout:
    """The way through `model`, from `meta_model`, that `train.layout` = `asked` takes: 'auto' prefers packed. With
    `pictures` it is for rows that have them.

    Raises ModelError, with the reason, if the model cannot be passed through in that way, or in none.
    """
    known = _layouts.setdefault(model, {})
    if (asked, pictures) not in known:
        known[asked, pictures] = _choose(model, asked, pictures=pictures)
    return known[asked, pictures]


# Of models on meta, which nobody changes. A process asks several times while it starts, and the answer takes a pass
# through the model.
_layouts: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, bool], Layout]] = WeakKeyDictionary()
_unread: WeakKeyDictionary[PreTrainedModel, Set[str]] = WeakKeyDictionary()


def _choose(model: PreTrainedModel, asked: str, *, pictures: bool) -> Layout:
    decoder = parts_of(model).decoder
    if reads_pictures(model.config):
        _require_text_alone(model, decoder)
    if asked == "whole":
        return Layout("whole")
    try:
        require_packable(model, decoder)
        require_packed_attention(decoder)
        if pictures and sees_both_ways(decoder):
            raise ModelError(
                f"{type(model).__name__} lets the tokens of a picture see later ones, which packed attention does not"
            )
    except ModelError as error:
        if asked == "packed":
            raise ModelError(f"{error.message}; set train.layout to 'auto' or 'whole'") from error
        return Layout("whole", error.message)
    return Layout("packed")


def _require_text_alone(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ModelError if a decoder on meta wants more than tokens, such as pictures, or lets them see later ones."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} has an encoder, which lets every token see later ones; use another model")
    try:
        decoder(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=False)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{name} cannot be called with text alone ({one_line(error)}); use another model") from None
    except RuntimeError:
        pass  # its code depends on values, of which there are none on meta


def make_policy(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    layout: str = "auto",
    value_head: bool = False,
    compute: torch.dtype | None = None,
    buffers: bool = True,
    vocabulary: int = 0,
    group: dist.ProcessGroup | None = None,
    pictures: PictureInputs | None = None,
) -> Policy:
    """The policy of `config`, or a critic with `value_head`, as `choose_layout` says: parameters on meta in `dtype`,
    real buffers on the CPU, for layers that compute in `compute`, by default `dtype`; without `buffers` these are on
    meta too. Log-probs and entropy are over the ids below `vocabulary`, all if that is 0. With a `group`, its ranks
    share the rows of the output matrix, see `Policy`. With `pictures`, a tower's inputs, the policy has one.
    Raises ModelError if transformers cannot build it, or CoreRL not train it."""
    chosen = choose_layout(meta_model(config, value_head=value_head), layout, pictures=pictures is not None)
    packed = chosen.name == "packed"
    model = build_on_meta(
        config,
        dtype=dtype,
        attention=PACKED if packed else own_attention(config),
        value_head=value_head,
        compute=compute,
        buffers=buffers,
    )
    kind = PackedPolicy if packed else WholePolicy
    policy = kind(model, vocabulary=vocabulary, group=group)
    if pictures is not None:
        policy.tower = pictures.tower(policy.decoder, build_tower(config, dtype=compute or dtype))
    return policy


def require_packed_attention(decoder: PreTrainedModel) -> None:
    """Raise ModelError if the layers of a decoder that is wholly on meta ask packed attention for what it lacks, or do
    not pass it the bounds of sequences."""
    with _run_as_packed(decoder) as unseen:
        try:
            _pass_two_tokens(decoder)
        except ModelError:
            raise
        except Exception as error:
            # Some code depends on values, of which there are none on meta. Then it is enough that each kind of layer
            # that mixes tokens was called.
            if unseen or not isinstance(error, RuntimeError):
                raise ModelError(
                    f"{type(decoder).__name__} cannot be called with packed sequences ({one_line(error)})"
                ) from error


def unread_parameters(model: PreTrainedModel) -> Set[str]:
    """Names of the parameters that no pass over text reads, so that they never get a gradient: attention to an encoder
    that is not there, for example. `model` is from `meta_model`; empty if its code depends on values."""
    if model not in _unread:
        _unread[model] = frozenset(_find_unread(model, parts_of(model)))
    return _unread[model]


def _find_unread(model: PreTrainedModel, parts: Parts) -> set[str]:
    passed_over = {id(param) for module in other_mixers(parts.decoder) for param in module.parameters()}  # on meta
    with _run_as_packed(parts.decoder), Reads() as reads:
        try:
            _pass_two_tokens(parts.decoder)
        except Exception:  # as above
            return set()
    read = passed_over | reads.parameters.keys()
    after = {VALUE_HEAD_WEIGHT} if parts.head is None else set(parts.head.reads)
    return {name for name, param in model.named_parameters() if id(param) not in read} - after


@torch.no_grad()
def _pass_two_tokens(decoder: PreTrainedModel) -> None:
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    mask = torch.ones_like(tokens, device="cpu")  # some layers' code asks whether it hides anything
    decoder(**_call(tokens, tokens, mask, PackedSequences.of(np.array([0, 2]), "cpu")))


@contextmanager
def _run_as_packed(decoder: PreTrainedModel) -> Iterator[set[type]]:
    """Within the block, the decoder is one that `PackedPolicy` runs, with experts that can be on meta. Gives the
    classes of modules that mix tokens and have not been called."""
    register_packed_attention()
    held = (getattr(each, "config", None) for each in decoder.modules())
    configs: dict[int, Any] = {id(each): each for each in held if isinstance(each, PreTrainedConfig)}
    before = [(config, config._attn_implementation, config._experts_implementation) for config in configs.values()]
    apart = run_on_rows(decoder)
    unseen = {type(module) for module in mixers(decoder)}
    handles = [
        module.register_forward_hook(lambda module, *_: unseen.discard(type(module))) for module in mixers(decoder)
    ]
    try:
        for config in configs.values():
            config._attn_implementation, config._experts_implementation = PACKED, "batched_mm"
        yield unseen
    finally:
        for handle in handles:
            handle.remove()
        for module in apart:
            del module.forward
        for config, attention, experts in before:
            config._attn_implementation, config._experts_implementation = attention, experts


def packed_call(tokens: torch.Tensor, positions: torch.Tensor, packing: PackedSequences) -> dict[str, Any]:
    """The arguments of a decoder for packed tokens and positions [T]."""
    # Without a mask, transformers would look for packed sequences in the positions, which waits for the device.
    return _call(tokens[None], positions[None], torch.ones_like(tokens)[None], packing)


def _call(tokens: Any, positions: Any, mask: Any, packing: Any) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": mask,
        "use_cache": False,
        "packing": packing,
    }


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


class PackedPolicy(Policy):
    """A policy that passes packed sequences through the decoder of a model from `build_on_meta(..., attention=PACKED)`.
    Raises ModelError if the model cannot be packed."""

    def __init__(self, model: PreTrainedModel, *, vocabulary: int = 0, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(model, vocabulary=vocabulary, group=group)
        require_packable(model, self.decoder)
        if (attention := model.config._attn_implementation) != PACKED:
            raise ModelError(f"{type(model).__name__} was built with {attention!r} attention, expected {PACKED!r}")
        # The rows of layers with a state are padded, in whatever order the sequences are.
        self.rectangular = bool(run_on_rows(self.decoder))

    def hidden_before(
        self, tokens: Tensor, packing: PackedSequences, positions: Tensor, seen: Seen | None = None
    ) -> Tensor:
        call = packed_call(tokens, positions, packing)
        if seen is None:
            hidden: Tensor = self.decoder(**call).last_hidden_state[0]
        else:
            assert self.tower is not None
            call["position_ids"] = self.tower.positions(tokens, positions, packing.bounds, seen)
            with self.tower.showing([each for own in seen.features for each in own]) as shown:
                hidden = self.decoder(**call, **shown).last_hidden_state[0]
        return hidden.index_select(0, packing.previous)


class WholePolicy(Policy):
    """A policy that passes right-padded rows through the decoder of a model with an attention of transformers.

    A micro-batch is one call of the decoder, however many tokens it has: ranks that gather weights together call it
    equally often.
    """

    rectangular = True

    def hidden_before(
        self, tokens: Tensor, packing: PackedSequences, positions: Tensor, seen: Seen | None = None
    ) -> Tensor:
        rows, gather, scatter = packing.rows
        self.routers.set_cells(gather, scatter)
        # Padding is on the right, where no real token sees it: no mask is needed, and attention without one is faster.
        call: dict[str, Any] = {"input_ids": tokens[gather].view(*rows.shapes[0]), "use_cache": False}
        if seen is None:
            cells = self.decoder(**call).last_hidden_state
        else:
            assert self.tower is not None
            numbered = self.tower.positions(tokens, positions, packing.bounds, seen)[..., gather]
            call["position_ids"] = numbered.view(*numbered.shape[:-2], *rows.shapes[0])
            call |= self.tower.kinds_of_tokens(seen.slots[gather].view(*rows.shapes[0]))
            first = rows.gather.reshape(rows.shapes[0])[:, 0]  # of each row, whose order is that of lengths
            order = np.searchsorted(packing.bounds, first, side="right") - 1
            with self.tower.showing([each for place in order.tolist() for each in seen.features[place]]) as shown:
                cells = self.decoder(**call, **shown).last_hidden_state
        hidden: Tensor = cells.flatten(0, 1).index_select(0, scatter[packing.continuations - 1])
        return hidden


OFFSET = 2  # rows that OPT's table has before its first position


def position_limit(model: PreTrainedModel, *, wanted: int) -> int | None:
    """The number of the model's positions if it has a table of so many, learned or of sines, and a sequence of `wanted`
    tokens has more; else None."""
    positions = context_length(model.config)
    if positions is None or positions >= wanted:
        return None
    words = model.get_input_embeddings()
    rows = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    rows += [buffer.shape[0] for buffer in model.buffers() if buffer.dim() == 2]
    return positions if any(positions <= each <= positions + OFFSET for each in rows) else None
