"""Measure how large a model is: the elements of its weights, by where they are."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from corerl.kinds import ModelSize
from corerl.models.build import VALUE_HEAD, decoder_layers
from corerl.models.lora import adapter_parameters, trained_parameters
from corerl.models.mixers import attention_in_pieces
from corerl.models.parts import parts_of

EXPERTS = ".experts."  # in the names of the weights of experts that tokens are routed to


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
