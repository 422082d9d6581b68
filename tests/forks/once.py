"""What a process would look at again for each of many models, it looks at once for each that differs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

from corerl.models import layouts


def look_once() -> None:
    """A model that is like one that passed tells nothing new: `models.layouts` leaves it out. Once is enough for a
    process."""
    remember(layouts, "require_packable", like)
    remember(layouts, "require_packed_attention", like)


def like(model: PreTrainedModel, *_: Any) -> Hashable:
    return type(model), model.config.to_json_string(use_diff=False)


def remember(module: ModuleType, name: str, key: Callable[..., Hashable]) -> None:
    """What the function has returned for arguments with the same key, it is not asked again."""
    function = getattr(module, name)
    if hasattr(function, "__wrapped__"):
        return
    known: dict[Hashable, Any] = {}

    @functools.wraps(function)
    def remembering(*args: Any) -> Any:
        asked = key(*args)
        if asked not in known:
            known[asked] = function(*args)
        return known[asked]

    setattr(module, name, remembering)
