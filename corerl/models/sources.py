"""Where the weights of a fresh run come from."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from corerl.config.schema import LoraConfig, ModelConfig
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.models.files import look_at, model_files
from corerl.models.initial import initials
from corerl.models.names import peft_names
from corerl.models.peft_files import PeftFiles, begins
from corerl.models.random import RandomSource
from corerl.models.readers import FirstOf
from corerl.weights.adapters import is_adapter
from corerl.weights.chunks import TensorSource


def initial_source(
    model: ModelConfig,
    hf: PreTrainedConfig,
    held: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    lora: LoraConfig | None = None,
) -> TensorSource:
    """The source of the tensors `held`, name -> shape: the model's directory, or random from its config and the run's
    seed. A value head that the directory lacks is random too, and so are new adapters."""
    adapters = {name: shape for name, shape in held.items() if is_adapter(name)}
    shapes = {name: shape for name, shape in held.items() if name not in adapters}
    drawn = functools.partial(RandomSource, hf, seed=seed, device=device)
    sources: list[TensorSource] = []
    if lora is not None and adapters:
        if lora.path:
            sources.append(PeftFiles(lora.path, peft_names(look_at(hf, lora=lora))))
        else:
            sources.append(drawn(adapters, initials=begins(adapters, lora.init)))
    if model.path:
        head = {name: shape for name, shape in shapes.items() if name == VALUE_HEAD_WEIGHT}
        sources += [model_files(model.path, hf), *([drawn(head)] if head else [])]
    else:
        sources.append(drawn(shapes, initials=initials(hf, seed=seed)))
    return FirstOf(*sources) if len(sources) > 1 else sources[0]
