"""Choose the way through a model, packed sequences or the whole model on padded rows, and build its policy."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from attrs import frozen
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models.attention import PACKED
from corerl.models.build import architecture_of, build_on_meta
from corerl.models.config import reads_pictures
from corerl.models.files import look_at
from corerl.models.packable import require_packable, require_packed_attention
from corerl.models.packed import PackedPolicy
from corerl.models.parts import parts_of
from corerl.models.policy import Policy
from corerl.models.whole import WholePolicy


@frozen
class Layout:
    name: Literal["packed", "whole"]
    why: str = ""  # whole, though it was not asked for: what keeps the model from being packed


def choose_layout(model: PreTrainedModel, asked: str) -> Layout:
    """The way through `model`, from `look_at`, that `train.layout` = `asked` takes: 'auto' prefers packed.

    Raises ModelError, with the reason, if the model cannot be passed through in that way, or in none.
    """
    decoder = parts_of(model).decoder
    if reads_pictures(model.config):
        _require_text_alone(model, decoder)
    if asked == "whole":
        return Layout("whole")
    try:
        require_packable(model, decoder)
        require_packed_attention(decoder)
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
) -> Policy:
    """The policy of `config`, or a critic with `value_head`, as `choose_layout` says: parameters on meta in `dtype`,
    real buffers on the CPU, for layers that compute in `compute`, by default `dtype`; without `buffers` these are on
    meta too. Log-probs and entropy are over the ids below `vocabulary`, all if that is 0. With a `group`, its ranks
    share the rows of the output matrix, see `Policy`. Raises ModelError if transformers cannot build it, or CoreRL not
    train it."""
    chosen = choose_layout(look_at(config, value_head=value_head), layout)
    packed = chosen.name == "packed"
    model = build_on_meta(
        config,
        dtype=dtype,
        attention=PACKED if packed else own_attention(config),
        value_head=value_head,
        compute=compute,
        buffers=buffers,
    )
    return (PackedPolicy if packed else WholePolicy)(model, vocabulary=vocabulary, group=group)


def own_attention(config: PreTrainedConfig) -> str:
    """The fastest attention that transformers has for the model on every device."""
    return "sdpa" if getattr(architecture_of(config), "_supports_sdpa", False) else "eager"
