"""How adapters begin, and the directories in which PEFT keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corerl.config.schema import ALL_LINEAR, LoraConfig
from corerl.errors import ModelError
from corerl.models.initial import Constant, Initial, Normal, Uniform
from corerl.models.readers import SafetensorsSource
from corerl.weights.adapters import A

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What a PEFT directory may say that changes what its adapters compute, or the weights beside them -> the values with
# which they are those of CoreRL. (Dropout is none of it: it is of PEFT's own training.)
PLAIN: Mapping[str, Sequence[Any]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "exclude_modules": ([], "", None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "alora_invocation_tokens": ([], None),
    "ensure_weight_tying": (False, None),
    # The others begin with a part of the weights, which they take from these as the directory is loaded.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
    "use_bdlora": (None, False),
}
BEGINNING = ("eva_config",)  # tables of how adapters began, with init_lora_weights="eva"
READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora")
# What changes nothing that adapters compute, or nothing without another field that is refused.
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "layers_pattern", "qalora_group_size"),
)
LIBRARY = "_core"  # how the name of the library for another kind ends, which is harmless without the kind's table
OTHER_KINDS = "_config"  # how the names of tables for other ways to compute an adapter end
EMPTY: Sequence[Any] = (None, {})
UNSET: Sequence[Any] = (None, False, [], {}, "")  # of a field that a later PEFT has added
SAME: Mapping[str, str] = {}


def begins(shapes: Mapping[str, Sequence[int]], init: str) -> dict[str, Initial]:
    """How new adapters begin, by their names, as PEFT's do: A [rank, in] uniform within 1 / sqrt(in), which is He et
    al. 2015 with a slope of sqrt(5), or normal with a deviation of 1 / rank; B zero."""
    return {name: _a(shape, init) if name.endswith(A) else Constant(0.0) for name, shape in shapes.items()}


def _a(shape: Sequence[int], init: str) -> Initial:
    rank, inputs = shape
    return Normal(0.0, 1 / rank) if init == "gaussian" else Uniform(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


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
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error}); save the adapters again") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else None
        raise ModelError(f"{file} has peft_type={kind!r}, wanted 'LORA'; CoreRL trains no other adapters")
    for name, value in fields.items():
        if name in (*READ, *HARMLESS, *BEGINNING) or name.endswith(LIBRARY):
            continue
        plain = PLAIN.get(name, EMPTY if name.endswith(OTHER_KINDS) else UNSET)
        if value not in plain:
            raise ModelError(
                f"{file} has {name}={value!r}, wanted {plain[0]!r}; CoreRL cannot go on with such adapters"
            )
    targets: Any = fields.get("target_modules")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ModelError(f"{file} has target_modules={targets!r}, an expression; wanted a list of names")
    for name, wanted, is_so in (
        ("r", "a whole number of at least 1", _is_rank),
        ("lora_alpha", "a number above 0", _is_alpha),
        ("target_modules", "a list of names", _are_targets),
    ):
        if not is_so(fields.get(name)):
            raise ModelError(f"{file} has {name}={fields.get(name)!r}, wanted {wanted}; save the adapters again")
    return {
        "rank": fields["r"],
        "alpha": float(fields["lora_alpha"]),
        "targets": (targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        "rslora": bool(fields.get("use_rslora", False)),
    }


def _is_rank(value: object) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and 0 < float(value) < math.inf  # type: ignore[arg-type]


def _are_targets(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str) and each for each in value)
    return value == ALL_LINEAR


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
