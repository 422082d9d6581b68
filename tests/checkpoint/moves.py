"""A run that goes on elsewhere every two steps, beside one that stays; and what is exported of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import evolve
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from corerl.checkpoint.commit import begin
from corerl.checkpoint.format import WEIGHTS
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import ModelConfig
from corerl.driver.export import export_directory
from corerl.models.config import hf_config
from corerl_testing.compare import Tensors, assert_follows, different, same_bits, saved_tensors
from corerl_testing.subject import Checkpoint, Runs

Place: TypeAlias = tuple[str, Mapping[str, Any], int]  # backend, its options, ranks


def assert_moving_follows_staying(runs: Runs, directory: Path, kind: str, places: Sequence[Place]) -> str:
    """Two steps in each place, from the checkpoint of the one before: what is loaded equals what was saved to the last
    bit, and the whole run follows one on the plain backend that never stops. Returns the last checkpoint's role."""
    stays = runs.trained_as(1, runs.setup("plain", kind), 2 * len(places))
    resume, losses, grad_norms = "", list[float](), list[float]()
    saved: Mapping[str, Tensors] = {}
    for number, (backend, options, ranks) in enumerate(places):
        first = 2 * number
        checkpoint = Checkpoint(begin(directory, first + 2), ranks)
        setup = evolve(runs.setup(backend, kind), options=options)
        saving = {"save_after": first + 1, "save_to": checkpoint.role}
        found = runs.train(ranks, setup, range(first, first + 2), resume=resume, **saving)
        assert (found.optimizer_step, found.adam_step) == (first, first + 2)
        assert not resume or different(found.at_start, saved) == []
        saved, resume = found.state, checkpoint.complete()
        losses += found.losses
        grad_norms += found.grad_norms
    assert_follows(evolve(found, losses=losses, grad_norms=grad_norms), stays)
    return resume


def assert_export_is_what_transformers_loads(model: Path, checkpoint: str, directory: Path) -> None:
    """What is exported of a role's checkpoint, loaded and saved by transformers, equals it to the last bit."""
    exported, again = (str(directory / name) for name in ("export", "again"))
    trained = saved_tensors(CheckpointSource(Path(checkpoint), *WEIGHTS))
    tensors = ((name, torch.from_numpy(values)) for name, values in trained.items())
    export_directory(exported, config=hf_config(ModelConfig(path=str(model))), tokenizer=None, tensors=tensors)
    AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).save_pretrained(again)
    loaded = load_file(Path(again) / "model.safetensors")
    assert loaded.keys() == trained.keys()
    assert [name for name, values in trained.items() if not same_bits(loaded[name], values)] == []
