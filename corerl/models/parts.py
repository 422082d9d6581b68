"""Tell a model's decoder, which turns tokens into hidden states, from what follows it; refuse what is not causal."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping

from attrs import frozen
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models.build import VALUE_HEAD
from corerl.models.head import Head

TIES = "attends to the tokens of the highest scores, of which many are equal: padding changes its choice among those"
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
    # The first that is called with tokens, or else one that is given their embeddings, which it would make itself.
    for embeds, decoder in itertools.product((False, True), _decoders(model)):
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
    raise ModelError(f"CoreRL cannot tell the decoder of {name} from what follows it: {why}; use another model")


def _decoders(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """What may be the part of `model` that turns tokens into hidden states."""
    named = model.get_decoder()
    if isinstance(named, PreTrainedModel) and named is not model:
        yield named
    for outer in (model, named):
        inner = [child for child in outer.children() if isinstance(child, PreTrainedModel)]
        if len(inner) == 1 and inner[0] is not named:
            yield inner[0]
