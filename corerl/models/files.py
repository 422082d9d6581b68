"""Find the tensors of a model in the files of a Hugging Face directory as transformers finds them: under names with or
without the model's prefix, and with a head that is the embedding or one of its own; or make them at random, initialized
as transformers does it, any box of them alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import init
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from corerl.config.schema import LoraConfig, ModelConfig
from corerl.errors import ModelError
from corerl.models.build import VALUE_HEAD_WEIGHT, architecture_of, build_on_meta, build_tower, named_weights
from corerl.models.lora import PeftFiles, put_adapters
from corerl.models.names import hf_boxes, peft_names, shapes_of
from corerl.models.readers import INDEX, SINGLE, FirstOf, SafetensorsSource
from corerl.ops.noise import hash_key, normal, unit
from corerl.weights.adapters import A, is_adapter
from corerl.weights.chunks import TensorSource, within

META_MODELS = 16  # models that a process keeps on meta
COMPARED = 2**24  # elements at a time, of tensors that may be equal
_untied_heads: dict[tuple[object, ...], str] = {}  # reading a head and an embedding takes seconds


class ModelFiles(SafetensorsSource):
    """The files of a directory, by the names of the model of `config`; the files may have others for its tensors."""

    def __init__(self, directory: str | Path, config: PreTrainedConfig) -> None:
        super().__init__(directory)
        self._config = config
        self._naming: tuple[Callable[[str], str], dict[str, str]] | None = None

    def stored(self, name: str) -> str | None:
        if name in self.names or name == VALUE_HEAD_WEIGHT:  # which transformers does not know
            return super().stored(name)
        if self._naming is None:  # it takes a model, and few directories need it
            built = meta_model(self._config)
            name_in = _naming(built)
            found = {name_in(each): each for each in self.names}
            # A tensor that only the other end of a tie is in the files for is that.
            pairs = [pair for copy, origin in ties(built).items() for pair in ((copy, origin), (origin, copy))]
            self._naming = name_in, {**{one: found[other] for one, other in pairs if other in found}, **found}
        name_in, found = self._naming
        return found.get(name_in(name))

    def others(self, names: Iterable[str], model: PreTrainedModel) -> list[str]:
        """The tensors in the files that are none of `names`, the model's own, and are not tied to one of these."""
        taken = {self.stored(name) for name in names}
        copies = [f"{re.escape(name)}$" for name in ties(model)]  # equal to what they are tied to
        return sorted(name for name in self.names - taken if not any(re.search(copy, name) for copy in copies))


def model_files(directory: str | Path, config: PreTrainedConfig) -> ModelFiles:
    """The files to load a model of `config` from. Raises ModelError if they have a tensor of its own where the model
    has a tied one, so that it would be dropped."""
    if name := untied_head(config, directory):
        raise ModelError(
            f"{directory} has a {name} of its own, but in this run's model it is the same as another tensor; use "
            "weights of the same model"
        )
    return ModelFiles(directory, config)


def untied_head(config: PreTrainedConfig, directory: str | Path) -> str:
    """The first tensor that differs in the directory's files from the one that `config` ties it to; "" if there is
    none. transformers ties only what is equal, whatever a config says."""
    tied = getattr(architecture_of(config), "_tied_weights_keys", None) or {}
    files = [Path(directory) / name for name in (SINGLE, INDEX)]
    if not getattr(config, "tie_word_embeddings", False) or not any(file.is_file() for file in files):
        return ""
    stamp = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
    key = (config.model_type, str(directory), *stamp)
    if key not in _untied_heads:
        held = ModelFiles(directory, config)
        copies = [name for name in held.names if any(re.search(pattern, name) for pattern in tied)]
        pairs = ties(meta_model(config)).items() if copies else ()
        _untied_heads[key] = next((copy for copy, origin in pairs if _differ(held, copy, origin)), "")
    return _untied_heads[key]


def kept_files(
    directory: str | Path, config: PreTrainedConfig, trained: Iterable[str] = ()
) -> tuple[ModelFiles, list[str]]:
    """The files of a model that reads pictures, and the names of the tensors in them that are none of the text
    decoder's, nor `trained`, like those of a vision tower that is not. An export copies them."""
    files, model = model_files(directory, config), meta_model(config)
    return files, files.others([*shapes_of(model), VALUE_HEAD_WEIGHT, *trained], model)


def kept_config(directory: str | Path, config: PreTrainedConfig) -> dict[str, Any]:
    """What the config.json of a model that reads pictures says of the parts that a run on text does not build."""
    written, text = json.loads((Path(directory) / "config.json").read_bytes()), config.get_text_config()
    return {name: written[name] for name in config.sub_configs if name in written and getattr(config, name) is not text}


@frozen
class Described:
    """A config, equal to those that describe the same model."""

    kind: type[PreTrainedConfig]
    text: str
    config: PreTrainedConfig = field(eq=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Described:
        return cls(type(config), config.to_json_string(use_diff=False), config)


def meta_model(
    config: PreTrainedConfig, *, value_head: bool = False, lora: LoraConfig | None = None
) -> PreTrainedModel:
    """The model of `config`, with the adapters `lora`, wholly on meta: to learn its names and shapes. Raises ModelError
    if it cannot be built, or cannot have these.

    A rank needs it several times while it starts, and a model of hundreds of layers takes seconds to build: an equal
    config gets the same model, which nobody may change.
    """
    return _meta_model(Described.of(config), value_head, lora)


@functools.lru_cache(META_MODELS)
def _meta_model(asked: Described, value_head: bool, lora: LoraConfig | None) -> PreTrainedModel:
    model = build_on_meta(asked.config, dtype=torch.float32, attention="eager", value_head=value_head, buffers=False)
    if lora is not None:
        put_adapters(model, lora, dtype=torch.float32)
    return model


def shapes_of_tower(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by HF name of what reads the pictures of `config`'s model. Raises ModelError as
    `shapes_of` does."""
    return dict(_shapes_of_tower(Described.of(config)))


@functools.lru_cache(META_MODELS)
def _shapes_of_tower(asked: Described) -> dict[str, tuple[int, ...]]:
    return shapes_of(build_tower(asked.config, dtype=torch.float32))


def ties(model: PreTrainedModel) -> dict[str, str]:
    """Each tensor that transformers would tie to another one, and that other one."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def _differ(files: ModelFiles, copy: str, origin: str) -> bool:
    """Whether the files have both tensors, with different values."""
    names = files.stored(copy), files.stored(origin)
    if None in names or names[0] == names[1]:
        return False
    shape = files.shape(origin)
    if shape is None or files.shape(copy) != shape:
        return True
    rows = max(1, COMPARED // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        box = (start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:])
        a, b = files.read(copy, *box), files.read(origin, *box)
        if not torch.equal(a.to(torch.promote_types(a.dtype, b.dtype)), b.to(torch.promote_types(a.dtype, b.dtype))):
            return True
    return False


def _naming(model: PreTrainedModel) -> Callable[[str], str]:
    """The function that gives a tensor in a file the name under which transformers loads it; a part of a fused
    parameter keeps its own name, after the same prefix."""
    mapping: Any = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix

    def name_in(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [])
        fused, _ = rename_source_key(name, renamings, converters)
        loaded, _ = rename_source_key(name, renamings, converters, prefix, state)
        if loaded == f"{prefix}.{fused}":
            return f"{prefix}.{renamed}"
        return renamed if loaded == fused else renamed.removeprefix(f"{prefix}.")

    return name_in


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
    random = functools.partial(RandomSource, hf, seed=seed, device=device)
    sources: list[TensorSource] = []
    if lora is not None and adapters:
        if lora.path:
            sources.append(PeftFiles(lora.path, peft_names(meta_model(hf, lora=lora))))
        else:
            sources.append(random(adapters, initials=adapter_initials(adapters, lora.init)))
    if model.path:
        head = {name: shape for name, shape in shapes.items() if name == VALUE_HEAD_WEIGHT}
        sources += [model_files(model.path, hf), *([random(head)] if head else [])]
    else:
        sources.append(random(shapes, initials=initials(hf, seed=seed, pictures=bool(model.pictures))))
    return FirstOf(*sources) if len(sources) > 1 else sources[0]


# ---- random weights --------------------------------------------------------------------------------------------------


@frozen
class Normal:
    """Normal values, none further than `most` from the mean."""

    mean: float
    std: float
    most: float = math.inf


@frozen
class Uniform:
    low: float
    high: float


@frozen
class Constant:
    value: float


@frozen(eq=False)
class Fixed:
    """Values that depend on the place, such as the logarithms of 1, 2, 3, ..."""

    values: Tensor  # of the whole tensor


Initial: TypeAlias = Normal | Uniform | Constant | Fixed


def initials(config: PreTrainedConfig, *, seed: int, pictures: bool = False) -> dict[str, Initial]:
    """How each tensor of the model is initialized, by HF name, as transformers does it; with `pictures` also of what
    reads them. What it leaves alone is left out, if it has two dims or more. `seed` is for vectors with random values.

    Raises ModelError if the model cannot be built.
    """
    recorded: dict[int, Initial] = {}
    with torch.random.fork_rng(devices=[]), _recording(recorded):
        torch.manual_seed(seed)
        model = build_on_meta(config, dtype=torch.float32, attention="eager", vectors=True, pictures=pictures)
    found: dict[str, Initial] = {}
    boxes = hf_boxes(model)
    for name, weight in named_weights(model).items():
        initial: Initial | None = recorded.get(id(weight)) if weight.is_meta else Fixed(weight.detach())
        if initial is None:
            continue
        for box in boxes[name]:
            found[box.name] = Fixed(box.view(initial.values)) if isinstance(initial, Fixed) else initial
    return found


@contextmanager
def _recording(recorded: dict[int, Initial]) -> Iterator[None]:
    """Record what transformers' initialization would do to tensors on meta: id -> initial values.

    Its functions are replaced in `transformers.initialization`, where the models of transformers 5 look them up; a
    model that samples its weights otherwise would be left out.
    """

    def recorder(name: str, initial: Any) -> Any:
        fill = getattr(initialization, name)

        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                result: Tensor = fill(tensor, *args, **kwargs)
                return result
            if (values := initial(tensor, *args, **kwargs)) is not None:
                recorded[id(tensor)] = values
            return tensor

        return record

    with mock.patch.multiple(initialization, **{name: recorder(name, initial) for name, initial in INITIALS.items()}):
        yield


def _scaled(tensor: Tensor, gain: float, mode: str) -> float:
    """The deviation of Glorot & Bengio 2010 and He et al. 2015: gain / sqrt(fan)."""
    fan_in, fan_out = init._calculate_fan_in_and_fan_out(tensor)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
    return gain / math.sqrt(fan)


def _truncated(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any
) -> Normal:
    return Normal(mean, std, most=min(b - mean, mean - a))


def _kaiming(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", **_: Any) -> float:
    return _scaled(tensor, init.calculate_gain(nonlinearity, a), mode)


def _evenly(std: float) -> Uniform:
    return Uniform(-math.sqrt(3) * std, math.sqrt(3) * std)


# transformers' functions -> the initial values of a tensor that they would fill.
INITIALS: dict[str, Any] = {
    "normal_": lambda tensor, mean=0.0, std=1.0, **_: Normal(mean, std),
    "trunc_normal_": _truncated,
    "uniform_": lambda tensor, a=0.0, b=1.0, **_: Uniform(a, b),
    "constant_": lambda tensor, val: Constant(val),
    "ones_": lambda tensor: Constant(1.0),
    "zeros_": lambda tensor: Constant(0.0),
    "kaiming_normal_": lambda tensor, *args, **kwargs: Normal(0.0, _kaiming(tensor, *args, **kwargs)),
    "kaiming_uniform_": lambda tensor, *args, **kwargs: _evenly(_kaiming(tensor, *args, **kwargs)),
    "xavier_normal_": lambda tensor, gain=1.0, **_: Normal(0.0, _scaled(tensor, gain, "fan_avg")),
    "xavier_uniform_": lambda tensor, gain=1.0, **_: _evenly(_scaled(tensor, gain, "fan_avg")),
    "copy_": lambda tensor, other: None if other.is_meta else Fixed(other.detach().expand_as(tensor)),
}


def adapter_initials(shapes: Mapping[str, Sequence[int]], init: str) -> dict[str, Initial]:
    """How new adapters begin, by their names, as PEFT's do: A [rank, in] uniform within 1 / sqrt(in), which is He et
    al. 2015 with a slope of sqrt(5), or normal with a deviation of 1 / rank; B zero."""
    return {name: _a(shape, init) if name.endswith(A) else Constant(0.0) for name, shape in shapes.items()}


def _a(shape: Sequence[int], init: str) -> Initial:
    rank, inputs = shape
    return Normal(0.0, 1 / rank) if init == "gaussian" else Uniform(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


NOTHING: Mapping[str, Initial] = {}

# Values sampled at once. Each takes several int64 and float64 temporaries: on a CPU they fit in cache, on a GPU they
# briefly take 0.8 GiB.
VALUES = {"cpu": 2**18, "cuda": 2**24}


class RandomSource:
    """A `weights.chunks.TensorSource` of random float32 weights, by HF name.

    Tensors begin as `initials` says (`models.initial`). Of the others, those of more than one dim are normal(0,
    config.initializer_range), norm weights one, biases zero; raises ModelError on any other tensor of one dim. Weights
    are sampled and returned on `device`: a CPU core samples about 30 million values a second, which takes minutes for a
    large model. A GPU's values are equal up to rounding.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        shapes: Mapping[str, Sequence[int]],
        seed: int,
        device: torch.device | str = "cpu",
        *,
        initials: Mapping[str, Initial] = NOTHING,
    ) -> None:
        self._device = torch.device(device)
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._seed = seed
        std = float(getattr(config, "initializer_range", 0.02))
        self._initials = {
            name: initials.get(name) or _default(name, shape, std) for name, shape in self._shapes.items()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        initial = self._initials[name]
        if isinstance(initial, Constant):
            return torch.full(tuple(sizes), initial.value, device=self._device)
        if isinstance(initial, Fixed):
            box = (tuple(offsets), tuple(sizes))
            return initial.values[within(box, ((0,) * len(sizes), self._shapes[name]))].float().to(self._device)
        out = torch.empty(tuple(sizes), device=self._device)
        own = hashlib.blake2b(name.encode(), digest_size=8).digest()  # equal in every process, unlike hash()
        key = hash_key(self._seed, int.from_bytes(own, "little", signed=True))
        shape = self._shapes[name]
        # Flat indices in the whole tensor, of the box's entries in row 0.
        indices = torch.zeros((), dtype=torch.int64, device=self._device)
        for dim in range(1, len(shape)):
            stride = math.prod(shape[dim + 1 :])
            places = torch.arange(offsets[dim], offsets[dim] + sizes[dim], device=self._device)
            indices = indices[..., None] + stride * places
        row = math.prod(shape[1:])
        step = max(1, VALUES[self._device.type] // max(1, indices.numel()))
        for low in range(0, sizes[0], step):
            rows = torch.arange(offsets[0] + low, offsets[0] + min(low + step, sizes[0]), device=self._device)
            counters = rows.view(-1, *(1,) * indices.dim()) * row + indices
            out[low : low + len(rows)] = _sampled(initial, key, counters)
        return out


def _default(name: str, shape: tuple[int, ...], std: float) -> Initial:
    if len(shape) > 1:
        return Normal(0.0, std)
    if name.endswith((".weight", ".bias")):
        return Constant(1.0 if name.endswith(".weight") else 0.0)
    raise ModelError(f"no initialization is known for {name!r} {list(shape)}; set model.path to load weights instead")


def _sampled(initial: Normal | Uniform, key: int, counters: Tensor) -> Tensor:
    """float32 values in the shape of `counters`, a function of them and of the key."""
    if isinstance(initial, Uniform):
        return (initial.low + (initial.high - initial.low) * unit(key, counters)).float()
    if initial.most < 6 * initial.std:  # beyond, float32 has no values to cut off
        edge = 0.5 * math.erfc(initial.most / initial.std / math.sqrt(2))  # probability of each tail
        inside = edge + (1 - 2 * edge) * unit(key, counters)
        return (initial.mean + initial.std * math.sqrt(2) * torch.erfinv(2 * inside - 1)).float()
    return normal(key, counters) * initial.std + initial.mean
