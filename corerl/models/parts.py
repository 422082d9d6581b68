"""Tell a model's decoder, which turns tokens into hidden states, from what follows it; refuse what is not causal."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.kinds import ModelSize
from corerl.messages import one_line
from corerl.models.attention import attention_in_pieces
from corerl.models.build import VALUE_HEAD, decoder_layers
from corerl.models.lora import adapter_parameters, trained_parameters

TIES = "attends to the tokens with the highest scores; padding changes the choice among equal scores"
# Model types that nothing in their config gives away -> what they do.
OTHERS = {
    "axk2": TIES,
    "cpmant": "lets prompts see all of their tokens",
    "glm_moe_dsa": TIES,
    "hy_v4": TIES,
    "mistral_large4_text": TIES,
    "phimoe": "uses router_jitter_noise, which CoreRL sets to 0, also to mask experts, so its log-probs would differ "
    "from an engine's",
    "prophetnet": "predicts several tokens ahead, with attention to its own predictions",
    "xlm": "lets every token see later ones",
    "xlnet": "lets every token see later ones",
}
# Fields of a config -> values with which every token sees later ones. Of images' tokens alone, text has none.
BOTH_WAYS: Mapping[str, tuple[object, ...]] = {"is_decoder": (False,), "use_bidirectional_attention": (True, "all")}
CAUSAL_ENCODERS = ("gpt_neox", "gpt_neox_japanese")  # their config has an `is_decoder` that nothing reads


EXPERTS = ".experts."  # in the names of the weights of experts that tokens are routed to


@frozen(eq=False)
class Parts:
    decoder: PreTrainedModel
    head: Head | None  # a critic has a value head instead


def parts_of(model: PreTrainedModel) -> Parts:
    """The parts of a model that gives every token's log-prob, or value, from the tokens before it alone. Raises
    ModelError, with the reason, for any other."""
    config, name = model.config.get_text_config(), type(model).__name__
    if reason := OTHERS.get(config.model_type):
        raise ModelError(f"{name} {reason}; use another model")
    for field, ways in BOTH_WAYS.items():
        way = getattr(config, field, None)
        if way in ways and config.model_type not in CAUSAL_ENCODERS:
            causal = field == "is_decoder"
            raise ModelError(
                f"{name} lets every token see later ones with {field}={way}; use a causal language model"
                + (f", or set {field}={causal} if it was trained as one" if model.config is config else "")
            )
    reasons = []
    # The first that is called with tokens, or else one that is given their embeddings, which it would make itself. With
    # a value head any would do; of a model that reads pictures it must be the one that is shown them.
    decoders = sorted(_decoders(model), key=lambda each: hasattr(model, VALUE_HEAD) and not shows_pictures(each))
    for embeds, decoder in itertools.product((False, True), decoders):
        if embeds and decoder.get_output_embeddings() is not None:
            continue  # a model with a head of its own, as in Llama 4
        try:
            inspect.signature(decoder.forward).bind(input_ids=None, use_cache=False)
            return Parts(decoder, None if hasattr(model, VALUE_HEAD) else Head(model, decoder, embeds=embeds))
        except TypeError as error:
            reasons.append(f"{type(decoder).__name__} cannot be called with tokens alone ({one_line(error)})")
        except ModelError as error:
            reasons.append(error.message)
    why = reasons[0] if reasons else "it has no part that turns tokens into hidden states"
    raise ModelError(f"CoreRL cannot separate the decoder of {name} from its head: {why}; use another model")


def shows_pictures(decoder: PreTrainedModel) -> bool:
    """Whether a decoder puts what a tower makes of pictures among the tokens."""
    return hasattr(decoder, "get_image_features")


def sees_both_ways(decoder: PreTrainedModel) -> bool:
    """Whether a decoder lets the tokens of one picture see each other, for which it takes the kinds of tokens."""
    text = decoder.config.get_text_config()
    takes = inspect.signature(decoder.forward).parameters
    return "token_type_ids" in takes or getattr(text, "use_bidirectional_attention", None) == "vision"


def _decoders(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """What may be the part of `model` that turns tokens into hidden states."""
    named = model.get_decoder()
    if isinstance(named, PreTrainedModel) and named is not model:
        yield named
    for outer in (model, named):
        inner = [child for child in outer.children() if isinstance(child, PreTrainedModel)]
        if len(inner) == 1 and inner[0] is not named:
            yield inner[0]


HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
PRODUCTS = ("mm", "addmm", "bmm", "linear")
# What models do besides around one matrix, none of which changes a number but by rounding.
VIEWS = ("t", "transpose", "view", "_unsafe_view", "slice", "select", "unsqueeze", "expand", "alias", "_to_copy")


class Head:
    """Turns hidden states [C, H] into logits [C, V], for a few tokens at a time.

    `linear` is the module whose weight [V, H], and bias [V], is all that there is to it. Else, when that is None, this
    calls the model's own forward, on a copy of its modules that shares their parameters and buffers, where the decoder
    only returns the given hidden states. Each token is a row of its own, as in generation with a cache. The copies have
    no hooks: this may run more often on one rank than on another, so nothing may gather weights in it.

    Raises ModelError if the model's forward does not make logits of hidden states alone, or does not call the decoder
    with the tokens or, with `embeds`, with what the embedding makes of them.
    """

    def __init__(self, model: PreTrainedModel, decoder: PreTrainedModel, *, embeds: bool = False) -> None:
        self._given: list[_Hidden] = []
        self._tokens: list[Any] = []  # what the decoder was called with
        self._model = cast(PreTrainedModel, _twin(model, decoder, self._reached))
        weight = next(model.parameters())
        width = getattr(model.config.get_text_config(), "hidden_size", None)
        if width is None:
            raise ModelError("its config has no hidden_size")
        hidden, tokens = weight.new_empty(2, width), torch.zeros(2, 1, dtype=torch.long, device=weight.device)
        with torch.no_grad(), Reads() as reads, _Calls() as calls:
            try:
                logits = self._logits(hidden, tokens)
            except Exception as error:  # whatever a model's code raises when its decoder is not there
                raise ModelError(
                    f"what follows the decoder needs more than hidden states ({one_line(error)})"
                ) from error
        wanted = (tokens, *(reads.embedded if embeds else ()))
        if not self._tokens or not any(self._tokens[0] is each for each in wanted):
            raise ModelError("its decoder is not called with the tokens")
        if logits is None:
            raise ModelError("it makes no logits of tokens alone")
        if logits.shape[:2] != tokens.shape:
            raise ModelError(f"it makes logits {list(logits.shape)} of 2 rows with one token each")
        last = model.get_output_embeddings()
        own = {id(param) for param in (last.parameters(recurse=False) if last is not None else ())}
        if embeds:  # which the decoder makes itself
            del calls.names["embedding"]
            for param in decoder.get_input_embeddings().parameters():
                if id(param) not in own:
                    reads.parameters.pop(id(param), None)
        names = {id(param): name for name, param in model.named_parameters()}
        self.vocab_size = logits.shape[2]
        self.reads = tuple(names[each] for each in reads.parameters if each in names)  # parameters of the model
        products = sum(calls.names[name] for name in PRODUCTS)
        alone = products == 1 and calls.names.keys() <= {*PRODUCTS, *VIEWS}
        fits = alone and own == reads.parameters.keys() and last.weight.shape == (self.vocab_size, width)
        self.linear = last if fits else None

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
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        self._tokens = [each for each in given if each is not None]
        return self._given[0]


class _Hidden:
    """Stands for the output of a decoder, whatever its class: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class Reads(TorchFunctionMode):
    """Notes the parameters that torch functions are called with, by id, in order, and the embeddings they make."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, None] = {}
        self.embedded: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = (each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        self.parameters.update({id(each): None for each in found})
        made = func(*args, **(kwargs or {}))
        if func is nn.functional.embedding:
            self.embedded.append(made)
        return made


class _Calls(TorchDispatchMode):
    """Notes the operations that are run on floating-point numbers, in order, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(each, Tensor) and each.is_floating_point() for each in tree_leaves((args, kwargs, result))):
            self.names[func.overloadpacket.__name__] += 1
        return result


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


def size_of(model: PreTrainedModel) -> ModelSize:
    """The elements of a model's weights, by where they are."""
    layers = list(dict.fromkeys(decoder_layers(model)))
    trained = trained_parameters(model) if adapter_parameters(model) else {}
    # A weight that layers share is counted in the first of them, and what is trained beside frozen weights apart.
    held = {id(param) for param in trained.values()}
    inside: list[dict[str, torch.nn.Parameter]] = []
    for layer in layers:
        inside.append({name: param for name, param in layer.named_parameters() if id(param) not in held})
        held.update(map(id, inside[-1].values()))
    embedding: Any = model.get_input_embeddings().weight
    head: Any = model.get_submodule(VALUE_HEAD) if hasattr(model, VALUE_HEAD) else model.get_output_embeddings()
    ahead = None if head is None or head.weight is embedding else head.weight
    ends = [each for each in (embedding, ahead) if each is not None]
    known = held | {id(each) for each in ends}
    return ModelSize(
        layers=tuple(sum(param.numel() for param in params.values()) for params in inside),
        experts=tuple(
            sum(param.numel() for name, param in params.items() if EXPERTS in f".{name}") for params in inside
        ),
        embedding=embedding.numel(),
        head=0 if ahead is None or id(ahead) in held else ahead.numel(),
        adapters=sum(param.numel() for param in trained.values()),
        rest=sum(param.numel() for param in model.parameters() if id(param) not in known),
        hidden=embedding.shape[1],
        in_pieces=attention_in_pieces(parts_of(model).decoder),
    )
