"""What a process would look at again for each of many models, it looks at once for each that differs."""

from __future__ import annotations

import functools

from torch import nn
from transformers import PreTrainedModel

from corerl.models import layout, mixers


def look_once() -> None:
    """A pass on meta through a model that is like one that passed tells nothing new; `models.layout` leaves it out.
    What words a class's code has, `models.mixers` reads once."""
    look = layout.require_packed_attention
    passed: set[tuple[type, str]] = set()

    @functools.wraps(look)
    def looked(model: PreTrainedModel) -> None:
        key = type(model), model.config.to_json_string(use_diff=False)
        if key not in passed:
            look(model)
            passed.add(key)

    layout.require_packed_attention = looked
    has = mixers._has
    known: dict[tuple[type | str, ...], bool] = {}

    @functools.wraps(has)
    def read(module: nn.Module, *words: str) -> bool:
        key = type(module), *words
        if key not in known:
            known[key] = has(module, *words)
        return known[key]

    mixers._has = read
