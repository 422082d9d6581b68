"""Low-rank adapters: which linear layers and experts of a model have one, what is trained then, and the directories in
which PEFT keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from corerl.config.schema import ALL_LINEAR, EXPERTS, LoraConfig
from corerl.errors import ModelError
from corerl.messages import listed, nearest
from corerl.models.build import VALUE_HEAD, VALUE_HEAD_WEIGHT
from corerl.models.config import reads_pictures
from corerl.models.readers import SafetensorsSource
from corerl.models.routing import choosers

LORA_PARTS = ("lora_A", "lora_B")
ADAPTERS = "adapters"  # the name of the adapters' module in one of experts
ALIGNED = 8  # columns, of which grouped products of bfloat16 take multiples
SHOWN = 6  # names in one line
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora")  # of a directory's adapter_config.json
# What changes nothing that adapters compute, or nothing without another field that is refused.
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "layers_pattern", "qalora_group_size", "megatron_core", "eva_config"),
)
# All other fields change what adapters compute, or the weights that they are added to, unless they have these values.
UNSET: Sequence[Any] = (None, False, [], {}, "")
PLAIN: Mapping[str, Sequence[Any]] = {
    "bias": ("none", None),
    # With others adapters begin with a part of the weights, which they take from these as the directory is loaded.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
}
SAME: Mapping[str, str] = {}
EXPERTS_TOO = ", or experts whose weights are [experts, outputs, inputs] without biases"


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
        return F.linear(input, self.weight, self.bias) + changed


class ExpertAdapter(nn.Module):
    """The adapters of a fused weight [E, out, in] of E experts, in which each has `parts` linear layers, one below the
    other. On meta in `dtype`: `lora_A` [E, parts rank, in] has the layers' A, `lora_B` [E, out, rank] their B."""

    def __init__(self, weight: Tensor, *, parts: int, rank: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        experts, outputs, inputs = weight.shape
        self.parts, self.scale = parts, scale
        self.lora_A = nn.Parameter(torch.empty(experts, parts * rank, inputs, device="meta", dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank, device="meta", dtype=dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """[S, out] scale B (A x), of x [S, in] in the order of experts, of which number e has the rows that end at
        `ends[e]`."""
        a, b = self.lora_A.to(x.dtype).unflatten(1, (self.parts, -1)), self.lora_B.to(x.dtype)
        missing = -b.shape[-1] % ALIGNED
        low = _grouped(x, F.pad(a, (0, 0, 0, missing)).flatten(1, 2), ends)
        parts = zip(low.chunk(self.parts, -1), F.pad(b, (0, missing)).chunk(self.parts, 1), strict=True)
        return torch.cat([_grouped(*part, ends) for part in parts], dim=-1) * self.scale


class LoraExperts(nn.Module):
    """What makes experts of transformers experts with adapters, as a base of their class."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden] the sum over each token's experts `top_k_index` [T, k], by their weights [T, k]."""
        of: Any = self
        topk = top_k_index.shape[-1]
        chosen, order = top_k_index.flatten().sort()
        numbers = torch.arange(1, of.num_experts + 1, device=chosen.device)
        ends = torch.searchsorted(chosen, numbers).int()  # how many are of this expert or one before
        x = hidden_states[order // topk]
        x = (
            of._apply_gate(self._product("gate_up_proj", x, ends))
            if of.has_gate
            else of.act_fn(self._product("up_proj", x, ends))
        )
        weighted = self._product("down_proj", x, ends) * top_k_weights.flatten()[order, None]
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        return weighted[back].unflatten(0, (-1, topk)).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        return _grouped(x, getattr(self, name), ends) + self.get_submodule(f"{ADAPTERS}.{name}")(x, ends)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[S, out] of x [S, in], and of each expert's weight [E, out, in] for its rows."""
    if weight.is_meta:  # where grouped products of float32 have no shapes
        return x @ weight[0].t()
    from transformers.integrations.moe import _grouped_linear  # of 5.12 to 5.23; knows the kernels of each torch

    product: Tensor = _grouped_linear(x, weight, ends)
    return product


def takes_adapters(experts: nn.Module) -> bool:
    """Whether a module is experts of transformers whose weights are [E, out, in], a gate's rows above the others'."""
    known: Any = experts
    if not hasattr(experts, "_apply_gate") or known.is_transposed or known.has_bias or not known.is_concatenated:
        return False
    return not getattr(known, "has_post_expert_norm", False)  # which transformers 5.12 does not know


def _adapt_experts(module: Any, *, rank: int, scale: float, dtype: torch.dtype) -> None:
    weights = {"gate_up_proj": 2} if module.has_gate else {"up_proj": 1}
    adapters = {
        name: ExpertAdapter(getattr(module, name), parts=parts, rank=rank, scale=scale, dtype=dtype)
        for name, parts in {**weights, "down_proj": 1}.items()
    }
    module.add_module(ADAPTERS, nn.ModuleDict(adapters))
    module.__class__ = type(f"Lora{type(module).__name__}", (LoraExperts, type(module)), {})


def put_adapters(model: PreTrainedModel, lora: LoraConfig, *, dtype: torch.dtype) -> None:
    """Give the linear layers and experts that `lora`, which is settled, names adapters on meta in `dtype`, and freeze
    all other parameters but a value head, whose dtype becomes the same. Raises ModelError as `targets_in` does."""
    if lora.rank is None or lora.alpha is None or lora.targets is None:
        raise ModelError(f"put_adapters was given {lora}, expected settled adapters; give it lora.settled({{}})")
    how: Any = {"rank": lora.rank, "scale": lora.scale, "dtype": dtype}
    found = targets_in(model, lora)
    new = {id(module): LoraLinear(module, **how) for module in found.values() if isinstance(module, nn.Linear)}
    for name, module in found.items():
        parent, _, attribute = name.rpartition(".")
        if id(module) in new:
            setattr(model.get_submodule(parent), attribute, new[id(module)])
        else:
            _adapt_experts(module, **how)
    if (head := getattr(model, VALUE_HEAD, None)) is not None:
        head.to(dtype)
    trained = {id(param) for param in adapter_parameters(model).values()}
    for name, param in model.named_parameters():
        param.requires_grad_(id(param) in trained or name == VALUE_HEAD_WEIGHT)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name: those that `put_adapters` has not frozen."""
    named = dict(model.named_parameters())
    return {name: named[name] for name in named if named[name].requires_grad} if adapter_parameters(model) else named


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters, by their names in the model."""
    return {
        f"{name}.{part}": param
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear | ExpertAdapter)
        for part, param in module.named_parameters()
        if part.split(".")[0] in LORA_PARTS
    }


def adapted_parameter(adapter: str) -> str:
    """The name of the parameter that an adapter's parameter changes."""
    module, _, name = re.sub(r"\.lora_[AB]\b", "", adapter).rpartition(".")
    return f"{module.removesuffix(f'.{ADAPTERS}')}.{name}"


def targets_in(model: PreTrainedModel, lora: LoraConfig) -> dict[str, nn.Module]:
    """The linear layers and experts that get adapters, by name: of a model that reads pictures, those of its text
    decoder. Raises ModelError if a target names no module, or one that cannot have an adapter."""
    assert lora.targets is not None
    head = model.get_output_embeddings()
    text = model.get_decoder() if reads_pictures(model.config) else model
    inside = {id(head), *(id(module) for module in text.modules())}
    left_out = {id(each) for router in choosers(model) for each in router.modules()} | {id(head)}
    modules = model.named_modules(remove_duplicate=False)
    named = {name: module for name, module in modules if name and id(module) in inside}
    linears = {
        name: module
        for name, module in named.items()
        if type(module) is nn.Linear and name.split(".")[-1] != VALUE_HEAD
    }
    usual = {name: module for name, module in linears.items() if id(module) not in left_out}
    experts = {
        name: module for name, module in named.items() if name.split(".")[-1] == EXPERTS and takes_adapters(module)
    }
    able: dict[str, nn.Module] = {**linears, **experts}
    found: dict[str, nn.Module] = {}
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
        if other := next((name for name in named_so if name not in able), ""):
            raise ModelError(
                f"{other!r} is of class {type(named[other]).__name__}, wanted a linear layer{EXPERTS_TOO}; name layers "
                f"such as {listed(sorted({name.rpartition('.')[2] for name in usual}), SHOWN)}"
            )
        if any(id(module) == id(head) for module in named_so.values()):
            raise ModelError(f"{target!r} is the head, whose matrix is read in chunks; leave it out of the targets")
        found |= {name: able[name] for name in named_so}
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers that could have adapters; train all its weights")
    return found


class PeftFiles(SafetensorsSource):
    """The adapters in a directory of PEFT, by the names of `corerl.weights.adapters`; `names` has those that PEFT has
    others for."""

    holds = "a directory of PEFT"

    def __init__(self, directory: str | Path, names: Mapping[str, str] = SAME) -> None:
        super().__init__(directory)
        self._names = names

    def stored(self, name: str) -> str | None:
        return super().stored(self._names.get(name, name))

    def where(self, name: str) -> Path:
        return self.directory / PEFT_WEIGHTS

    def _find(self) -> dict[str, str]:
        if not (self.directory / PEFT_WEIGHTS).is_file():
            raise ModelError(f"{self.directory} has no {PEFT_WEIGHTS}; name a directory that PEFT has saved")
        return dict.fromkeys(self._opened(PEFT_WEIGHTS).keys(), PEFT_WEIGHTS)


def saved_settings(directory: str | Path) -> dict[str, Any]:
    """`rank`, `alpha`, `targets` and `rslora` of a PEFT directory. Raises ModelError if it has none, or adapters that
    compute something else than these settings say."""
    file = Path(directory) / PEFT_CONFIG
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); name a directory that PEFT has saved") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is no JSON ({error}); save the adapters again") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else None
        raise ModelError(f"{file} has peft_type={kind!r}, wanted 'LORA'; CoreRL trains no other adapters")
    for name, value in fields.items():
        if name not in (*READ, *HARMLESS) and value not in PLAIN.get(name, UNSET):
            raise ModelError(f"{file} has {name}={value!r}; CoreRL cannot go on with such adapters")
    rank, alpha, targets = (fields.get(name) for name in ("r", "lora_alpha", "target_modules"))
    names = [targets] if targets == ALL_LINEAR else targets if isinstance(targets, list) else []
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0 or not names:
        raise ModelError(
            f"{file} has r={rank!r}, lora_alpha={alpha!r}, target_modules={targets!r}, wanted a rank of at least 1, a "
            f"number above 0 and a list of names or {ALL_LINEAR!r}; save the adapters again"
        )
    return {
        "rank": rank,
        "alpha": float(alpha),
        # PEFT names each layer of each expert.
        "targets": tuple(sorted({re.sub(rf"\b({EXPERTS})\.\d+\.\w+$", r"\1", name) for name in names})),
        "rslora": bool(fields.get("use_rslora", False)),
    }


def peft_config(lora: LoraConfig, *, base: str, targets: Sequence[str]) -> dict[str, Any]:
    """What PEFT's adapter_config.json says of settled adapters of the modules `targets` of the model in `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": bool(lora.rslora),
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
