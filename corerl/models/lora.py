"""Low-rank adapters in a transformers model: which linear layers have one, and what is trained then."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from corerl.config.schema import ALL_LINEAR, LoraConfig
from corerl.errors import ModelError
from corerl.messages import listed, nearest
from corerl.models.build import VALUE_HEAD, VALUE_HEAD_WEIGHT
from corerl.models.routing import choosers

LORA_PARTS = ("lora_A", "lora_B")
SHOWN = 6  # names in one line


class LoraLinear(nn.Linear):
    """y = W x + b + scale B (A x), with the weight W [out, in] and the bias b of `base`, and A [rank, in], B [out,
    rank] on meta in `dtype` (Hu et al. 2022, equation 3)."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device="meta", dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device="meta", dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  -- as torch calls it
        changed: Tensor = self.lora_B(self.lora_A(input)) * self.scale
        # Looked up at each call, as `nn.Linear` does it: what shards parameters may put a product of its own there that
        # keeps no gathered weight for the backward pass.
        return nn.functional.linear(input, self.weight, self.bias) + changed


def put_adapters(model: PreTrainedModel, lora: LoraConfig, *, dtype: torch.dtype) -> None:
    """Give the linear layers that `lora`, which is settled, names adapters on meta in `dtype`, and freeze all other
    parameters but a value head, whose dtype becomes the same. Raises ModelError as `targets_in` does."""
    if lora.rank is None or lora.alpha is None or lora.targets is None:
        raise ModelError(f"put_adapters was given {lora}, expected settled adapters; give it lora.settled({{}})")
    found = targets_in(model, lora)
    new = {id(module): LoraLinear(module, rank=lora.rank, scale=lora.scale, dtype=dtype) for module in found.values()}
    for name, module in found.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new[id(module)])
    if (head := getattr(model, VALUE_HEAD, None)) is not None:
        head.to(dtype)
    freeze(model)


def freeze(model: nn.Module) -> None:
    """Freeze what training leaves as it is: call it again once other parameters are in the place of those on meta. Does
    nothing to a model without adapters."""
    if adapter_parameters(model):
        trained = {id(param) for param in trained_parameters(model).values()}
        for param in model.parameters():
            param.requires_grad_(id(param) in trained)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name: adapters and a value head if the model has adapters, else all."""
    named = dict(model.named_parameters())
    adapters = adapter_parameters(model)
    return {name: named[name] for name in named if not adapters or name in adapters or name == VALUE_HEAD_WEIGHT}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters, by their names in the model."""
    return {
        f"{name}.{part}": param
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
        for part, param in module.named_parameters()
        if part.split(".")[0] in LORA_PARTS
    }


def targets_in(model: PreTrainedModel, lora: LoraConfig) -> dict[str, nn.Linear]:
    """The linear layers that get adapters, by name. Raises ModelError if a target names no module, or one that cannot
    have an adapter."""
    assert lora.targets is not None
    head = model.get_output_embeddings()
    left_out = {id(each) for router in choosers(model) for each in router.modules()} | {id(head)}
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    linears = {
        name: module
        for name, module in named.items()
        if type(module) is nn.Linear and name.split(".")[-1] != VALUE_HEAD
    }
    usual = {name: module for name, module in linears.items() if id(module) not in left_out}
    found: dict[str, nn.Linear] = {}
    for target in lora.targets:
        if target == ALL_LINEAR:
            found |= usual
            continue
        named_so = {name: module for name, module in named.items() if f".{name}".endswith(f".{target}")}
        if not named_so:
            last = sorted({name.rpartition(".")[2] for name in usual})
            meant = nearest(target, last)
            raise ModelError(
                f"{type(model).__name__} has no module {target!r}{f', did you mean {meant!r}?' if meant else ';'} "
                f"linear layers that can have adapters are {listed(last, SHOWN)}"
            )
        if other := next((name for name in named_so if name not in linears), ""):
            raise ModelError(
                f"{other!r} is of class {type(named[other]).__name__}, wanted a linear layer; name layers such as "
                f"{listed(sorted({name.rpartition('.')[2] for name in usual}), SHOWN)}"
            )
        if any(id(module) == id(head) for module in named_so.values()):
            raise ModelError(f"{target!r} is the head, whose matrix is read in chunks; leave it out of the targets")
        found |= {name: linears[name] for name in named_so}
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers that could have adapters; train all its weights")
    return found
