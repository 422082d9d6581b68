"""Check that a checkpoint, or a model directory, holds every tensor of this run's model.

Imports transformers' models, which takes seconds: import this module only when there is something to check.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from corerl.checkpoint.format import unusable
from corerl.checkpoint.reader import CheckpointSource
from corerl.errors import CheckpointError, ModelError
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.models.files import look_at, model_files
from corerl.models.names import hf_boxes
from corerl.trainer.assign import CRITIC


def require_same_model(checkpoint: Path, role: str, model: PreTrainedConfig) -> None:
    """Raise CheckpointError if the checkpoint lacks the role or any tensor of its model, or a shape differs."""
    if not (checkpoint / role).is_dir():
        raise unusable(
            checkpoint,
            f"{checkpoint} has no {role}, but this run does; resume with the [algorithm] and [roles] it was trained "
            "with, or start a new run from its export",
        )
    held = CheckpointSource(checkpoint / role, "master").shapes
    for name, shape in shapes_of(role, model).items():
        found = held.get(name)
        if found != shape:
            what = "lacks" if found is None else f"has {list(found)} for"
            raise CheckpointError(
                f"{checkpoint} {what} {name!r}, this run's {role} needs {list(shape)}; resume with the [model] it was "
                "trained with, or start a new run in another run.dir"
            )


def require_weights(directory: str, role: str, model: PreTrainedConfig) -> None:
    """Raise ModelError if a model directory's files are damaged, lack a tensor of the model, or have one in another
    shape. Reads only the files' headers."""
    files = model_files(directory, model)
    for name, shape in shapes_of(role, model).items():
        found = files.shape(name)
        if found is None and name == VALUE_HEAD_WEIGHT:
            continue  # it then comes from the run's seed
        if found != shape:
            what = "lacks" if found is None else f"has {list(found)} for"
            raise ModelError(
                f"{files.where(name)} {what} {name!r}, but its config.json needs {list(shape)}: they belong to "
                "different models, or the file is incomplete; download or save them again"
            )


def shapes_of(role: str, model: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a role's model by HF name; allocates nothing."""
    built = look_at(model, value_head=role == CRITIC)
    return {box.name: box.shape for boxes in hf_boxes(built).values() for box in boxes}
