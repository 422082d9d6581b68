"""Run a causal language model as its authors wrote it, on padded rows, with the same call as for packed sequences.

Two passes: the decoder over a rectangle of right-padded rows, then, for a few tokens at a time, the model's own forward
with a stand-in for its decoder, so that scalings, caps, extra layers and heads are the model's own code and logits for
all tokens never exist at once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models.build import VALUE_HEAD
from corerl.models.packable import JITTER
from corerl.models.policy import Policy
from corerl.ops.attention import PackedSequences
from corerl.ops.logprobs import LOGITS, logprobs_of_logits
from corerl.ops.padding import rectangles
from corerl.ops.upload import upload

TIES = "attends to the tokens of the highest scores, of which many are equal: padding changes its choice among those"
# Model types that nothing in their config gives away -> what they do.
OTHERS = {
    "axk2": TIES,
    "cpmant": "lets prompts see all of their tokens",
    "glm_moe_dsa": TIES,
    "hy_v4": TIES,
    "phimoe": JITTER,
    "prophetnet": "predicts several tokens ahead, with attention to its own predictions",
    "xlm": "lets every token see later ones",
    "xlnet": "lets every token see later ones",
}
CAUSAL_ENCODERS = ("gpt_neox", "gpt_neox_japanese")  # their config has an `is_decoder` that nothing reads

HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


class WholePolicy(Policy):
    """A policy that passes right-padded rows through the decoder of a model with an attention of transformers, and a
    few tokens at a time through what the model does after it. Raises ModelError if that cannot give a token's log-prob.

    A micro-batch is one call of the decoder, however many tokens it has: ranks that gather weights together call it
    equally often. Logits exist for `chunk_tokens` tokens at a time, by default for as many as `token_logprobs` takes,
    and are computed again in the backward pass.
    """

    rectangular = True

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int | None = None) -> None:
        decoder = require_whole(model)
        super().__init__(model)
        self._decoder = (decoder,)  # in a tuple, or it would be a second child with the same parameters
        self._chunk_tokens = chunk_tokens
        self._rest = None if hasattr(model, VALUE_HEAD) else _Rest(model, decoder)

    @property
    def head_parameters(self) -> Sequence[nn.Parameter]:
        if self._rest is None:
            return list(cast(nn.Linear, self.value_head).parameters(recurse=False))
        found = dict(self.model.named_parameters())
        return [found[name] for name in self._rest.reads]

    def before(self, tokens: Tensor, packing: PackedSequences, positions: Tensor) -> Tensor:
        rows = rectangles(packing.bounds, fill=0.0)
        gather, scatter = upload(rows.gather, tokens.device), upload(rows.scatter, tokens.device)
        self.routers.laid_out(gather, scatter)
        # Padding is on the right, where no real token sees it: no mask is needed, and attention without one is faster.
        (decoder,) = self._decoder
        cells = decoder(input_ids=tokens[gather].view(*rows.shapes[0]), use_cache=False).last_hidden_state
        return cells.flatten(0, 1).index_select(0, scatter[packing.continuations - 1])

    def score(
        self, before: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        rest = self._rest
        assert rest is not None  # a critic has values instead

        def scored(hidden: Tensor, of: Tensor) -> tuple[Tensor, Tensor | None]:
            return logprobs_of_logits(rest(hidden), of, temperature=temperature, with_entropy=with_entropy)

        size = self._chunk_tokens or max(1, LOGITS[before.device.type] // rest.vocab_size)
        parts = [
            checkpoint(scored, hidden, of, use_reentrant=False, preserve_rng_state=False)
            for hidden, of in zip(before.split(size), targets.split(size), strict=True)
        ]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy) if with_entropy else None


def require_whole(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of a model that gives every token's log-prob, or value, from the tokens before it alone. Raises
    ModelError, with the reason, for any other."""
    config, name = model.config.get_text_config(), type(model).__name__
    if reason := OTHERS.get(config.model_type):
        raise ModelError(f"{name} {reason}; use another model")
    ways = {"is_decoder": False, "use_bidirectional_attention": True}
    for field, both in ways.items():
        if getattr(config, field, None) is both and config.model_type not in CAUSAL_ENCODERS:
            raise ModelError(
                f"{name} lets every token see later ones with {field}={both}; use a causal language model"
                + (f", or set {field}={not both} if it was trained as one" if model.config is config else "")
            )
    reasons = []
    for decoder in _decoders(model):
        if not hasattr(model, VALUE_HEAD) and (reason := _Rest(model, decoder).fault):
            reasons.append(reason)
            continue
        try:
            inspect.signature(decoder.forward).bind(input_ids=None, use_cache=False)
        except TypeError as error:
            reasons.append(f"{type(decoder).__name__} cannot be called with tokens alone ({one_line(error)})")
            continue
        return decoder
    why = reasons[0] if reasons else "it has no part that turns tokens into hidden states"
    raise ModelError(f"CoreRL cannot tell the decoder of {name} from what follows it: {why}; use another model")


def _decoders(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """What may be the part of `model` that turns tokens into hidden states."""
    named = model.get_decoder()
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if isinstance(named, PreTrainedModel) and named is not model:
        yield named
    if len(inner) == 1 and inner[0] is not named:
        yield inner[0]


class _Rest:
    """What a model does after its decoder: hidden states [C, H] to logits [C, V].

    The model's own forward, on a copy of its modules that shares their parameters and buffers, where the decoder only
    returns the given hidden states. Each token is a row of its own, as in generation with a cache. The copies have no
    hooks: this may run more often on one rank than on another, so nothing may gather weights in it.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        self._given: list[_Hidden] = []
        self._tokens: list[Any] = []  # what the decoder was called with
        self._model = cast(PreTrainedModel, _twin(model, decoder, self._reached))
        self.vocab_size = 0
        self.reads: tuple[str, ...] = ()  # names of the model's parameters that it reads
        self.fault = self._look(model)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._logits(hidden, torch.zeros(len(hidden), 1, dtype=torch.long, device=hidden.device))
        return logits[:, 0]

    def _logits(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self._given.append(_Hidden(hidden[:, None]))
        try:
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        finally:
            self._given.clear()
        return logits

    def _reached(self, *args: Any, **kwargs: Any) -> _Hidden:
        self._tokens = [*args[:1], *([kwargs["input_ids"]] if "input_ids" in kwargs else [])]
        return self._given[0]

    def _look(self, model: PreTrainedModel) -> str:
        """Run once, to see what it reads and that it makes logits of hidden states; returns what is wrong, or ""."""
        names = {id(param): name for name, param in model.named_parameters()}
        weight = next(model.parameters())
        width = getattr(model.config.get_text_config(), "hidden_size", None)
        if width is None:
            return "its config has no hidden_size"
        hidden = weight.new_empty(2, width)
        tokens = torch.zeros(2, 1, dtype=torch.long, device=weight.device)
        with torch.no_grad(), _Reads() as seen:
            try:
                logits = self._logits(hidden, tokens)
            except Exception as error:  # whatever a model's code raises when its decoder is not there
                return f"what follows the decoder needs more than hidden states ({one_line(error)})"
        if not self._tokens or self._tokens[0] is not tokens:
            return "its decoder is not called with the tokens"
        if logits.shape[:2] != tokens.shape:
            return f"it makes logits {list(logits.shape)} of 2 rows with one token each"
        self.vocab_size = logits.shape[2]
        self.reads = tuple(names[each] for each in seen.parameters if each in names)
        return ""


class _Hidden:
    """Stands for the output of a decoder, whatever its class: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Reads(TorchFunctionMode):
    """Notes the parameters that torch functions are called with, by id, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = (each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        self.parameters.update({id(each): None for each in found})
        return func(*args, **(kwargs or {}))


def _twin(module: nn.Module, decoder: nn.Module, stand_in: Callable[..., Any]) -> nn.Module:
    """A copy of `module` and its children, without hooks, which shares their parameters and buffers, now and after
    these are replaced; `decoder` among them calls `stand_in`."""
    twin = copy.copy(module)  # its dicts of parameters and buffers are those of `module`
    fields = vars(twin)
    fields |= {name: type(fields[name])() for name in HOOKS}
    if module is decoder:
        fields["forward"] = stand_in
    else:
        children = fields["_modules"].items()
        fields["_modules"] = {
            name: None if child is None else _twin(child, decoder, stand_in) for name, child in children
        }
    return twin
