"""A model's config as the key of what is found out about it once."""

from __future__ import annotations

from attrs import field, frozen
from transformers import PreTrainedConfig


@frozen
class Described:
    """A config, equal to those that describe the same model."""

    kind: type[PreTrainedConfig]
    text: str
    config: PreTrainedConfig = field(eq=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Described:
        return cls(type(config), config.to_json_string(use_diff=False), config)
