"""Check that a checkpoint or a model directory holds all tensors of a model, and that this machine can hold them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.checkpoint.format import WEIGHTS, unusable
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import LoraConfig
from corerl.errors import CheckpointError, ModelError
from corerl.messages import listed
from corerl.models.build import VALUE_HEAD_WEIGHT, stored_buffers
from corerl.models.config import reads_pictures
from corerl.models.files import kept_files, look_at, model_files
from corerl.models.layouts import unread_parameters
from corerl.models.lora import PeftFiles
from corerl.models.names import hf_boxes, peft_names, shapes_of
from corerl.models.parts import parts_of
from corerl.models.readers import SafetensorsSource
from corerl.weights.adapters import is_adapter

GIB = 2**30
FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors names them
SHOWN = 8  # names in one line


def require_memory(model: PreTrainedModel) -> None:
    """Raise ModelError if the weights alone, in 16 bits, need more than all host and device memory of this machine."""
    devices = range(torch.cuda.device_count())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    there += sum(torch.cuda.get_device_properties(index).total_memory for index in devices)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    count = sum(tensor.numel() for _, tensor in tensors)
    if 2 * count > there:
        name, largest = max(tensors, key=lambda each: each[1].numel())
        raise ModelError(
            f"the model has {count:.3g} parameters, which take {2 * count / GIB:.3g} GiB in 16 bits, and this machine "
            f"has {there / GIB:.3g} GiB in all; correct its fields (its largest tensor is {name!r}, "
            f"{list(largest.shape)}), or set cluster.address to a cluster that holds it"
        )


def require_tensors(files: SafetensorsSource, shapes: Mapping[str, tuple[int, ...]], *, needs: str, cure: str) -> None:
    """Raise ModelError if the files lack one of the tensors, or have it in another shape (then `needs` says who needs
    which), or not in floating point (then `cure` says what to do). Reads only the files' headers."""
    for name, shape in shapes.items():
        if (found := files.shape(name)) != shape:
            what = "lacks" if found is None else f"has {list(found)} for"
            raise ModelError(f"{files.where(name)} {what} {name!r}, {needs.format(list(shape))}")
        if (dtype := files.dtype(name)) not in FLOATS:
            raise ModelError(
                f"{files.where(name)} has values of type {dtype} for {name!r}, wanted one of {', '.join(FLOATS)}; "
                f"{cure}"
            )


def require_adapters(directory: Path, model: PreTrainedModel) -> None:
    """Raise ModelError unless the PEFT directory has the adapters of `model`, and no others."""
    names = peft_names(model)
    files = PeftFiles(directory, names)
    wanted = {name: shape for name, shape in shapes_of(model).items() if is_adapter(name)}
    needs = "this model needs {}; use adapters of the same model"
    require_tensors(files, wanted, needs=needs, cure="save the adapters again")
    if others := sorted(files.names - set(names.values())):
        raise ModelError(
            f"{directory} has tensors that no adapter of this model is, as {listed(others, SHOWN)}; use adapters of "
            "linear layers of the same model"
        )


def saved_shapes(model: PreTrainedConfig, *, value_head: bool, lora: LoraConfig | None) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a role's checkpoint holds, by name: with adapters no other weights that could be
    trained."""
    held = look_at(model, value_head=value_head, lora=lora)
    shapes = shapes_of(held)
    if lora is None:
        return shapes
    kept = names_of_buffers(held)
    return {
        name: shape for name, shape in shapes.items() if is_adapter(name) or name == VALUE_HEAD_WEIGHT or name in kept
    }


def names_of_buffers(held: PreTrainedModel) -> set[str]:
    """Those of a model's stored buffers in its files."""
    return {box.name for name in stored_buffers(held) for box in hf_boxes(held)[name]}


def require_same_tensors(directory: Path, role: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if a role's part of a checkpoint is not there, lacks any tensor of its `saved_shapes`, has
    one in another shape, or holds adapters of a role that trains all weights, or the other way round."""
    if not directory.is_dir():
        raise unusable(
            directory.parent,
            f"{directory.parent} has no {role}, but this run does; resume with the [algorithm] and [roles] it was "
            "trained with, or start a new run from its export",
        )
    held = CheckpointSource(directory, *WEIGHTS).shapes
    adapters = any(is_adapter(name) for name in held)
    if adapters != any(is_adapter(name) for name in shapes):
        what, wanted = ("adapters", "all weights") if adapters else ("all weights", "adapters")
        raise CheckpointError(
            f"{directory} holds {what}, this run's {role} trains {wanted}; resume with the [lora] it was trained with, "
            "or start a new run from its export"
        )
    for name, shape in shapes.items():
        found = held.get(name)
        if found != shape:
            what = "lacks" if found is None else f"has {list(found)} for"
            raise CheckpointError(
                f"{directory} {what} {name!r}, this run's {role} needs {list(shape)}; resume with the [model] it was "
                "trained with, or start a new run in another run.dir"
            )


OWN = (
    "but its config.json needs {}: they belong to different models, or the file is incomplete; download or save them "
    "again"
)
AS_ACTOR = (
    "but the actor's model needs {}, whose shapes its reference takes; a reference of another size, or with an "
    "embedding padded to another number of rows, is a role: set roles.reference.model.path instead"
)


def require_weights(directory: str, model: PreTrainedModel, config: PreTrainedConfig, *, needs: str = OWN) -> str:
    """Raise ModelError if a model directory's files are damaged, or do not hold the model of `config`. Returns a notice
    of tensors that are not used; "" if all are."""
    files = model_files(directory, config)
    shapes = shapes_of(model)
    if VALUE_HEAD_WEIGHT in shapes and files.shape(VALUE_HEAD_WEIGHT) is None:
        del shapes[VALUE_HEAD_WEIGHT]  # it then comes from the run's seed
    require_tensors(files, shapes, needs=needs, cure="use the original model, not a quantized one")
    if reads_pictures(config):
        return ""  # see `untrained`
    whole = look_at(config)  # with its head, which a critic does not read
    unused = files.unused([*shapes_of(whole), VALUE_HEAD_WEIGHT], whole)
    if not unused:
        return ""
    count = f"{len(unused)} tensors" if len(unused) > 1 else "a tensor"
    return f"{directory} has {count} that the model lacks, not used: {listed(unused, SHOWN)}"


def untrained(directory: str, config: PreTrainedConfig, model: PreTrainedModel) -> str:
    """A notice of the weights in a directory that a run on text does not train: of `model`, a role's on meta, and if it
    reads pictures those that it leaves out. "" if there are none."""
    if reads_pictures(config):
        files, names = kept_files(directory, config)
        kept, trained = {name: files.shape(name) or () for name in names}, shapes_of(look_at(config))
    else:
        unread = unread_parameters(model, parts_of(model))
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        kept = {name: shapes.pop(name) for name in unread}
        trained = shapes
    if not kept:
        return ""
    sizes, others = (sum(map(math.prod, each.values())) for each in (trained, kept))
    inside = {start for name in trained for start in _prefixes(name)}
    parts = {next(start for start in _prefixes(name) if start not in inside) for name in kept}
    return (
        f"{len(kept)} tensors ({others / (sizes + others):.1%} of the weights) are not trained, as the run reads "
        f"text alone, and an export has them unchanged: {listed(sorted(parts), SHOWN)}"
    )


def _prefixes(name: str) -> list[str]:
    """The names of a tensor and of the modules around it, the outermost first."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))
