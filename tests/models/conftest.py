"""Tiny models on disk, written once a kind, and models loaded from them as a backend of one rank loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from corerl.config.schema import ModelConfig
from corerl.models.build import build_on_meta, materialize
from corerl.models.config import hf_config
from corerl.models.files import ModelFiles
from corerl.models.names import hf_boxes, local_chunks
from corerl.weights.chunks import fill
from corerl_testing.models import KINDS, write_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> a directory that transformers wrote."""
    return {kind: write_tiny_model(kind, tmp_path_factory.mktemp(kind) / "hf") for kind in KINDS}


@pytest.fixture(params=KINDS)
def tiny_model(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    """Each kind in turn."""
    return tiny_models[request.param]


@pytest.fixture
def load() -> Callable[[Path, str], PreTrainedModel]:
    def load_model(directory: Path, attention: str) -> PreTrainedModel:
        config = hf_config(ModelConfig(path=str(directory)))
        model = build_on_meta(config, dtype=torch.float32, attention=attention)
        source, boxes = ModelFiles(directory, config), hf_boxes(model)
        tensors = {name: nn.Parameter(torch.full(p.shape, torch.nan)) for name, p in model.named_parameters()}
        for name, tensor in tensors.items():
            whole = local_chunks(boxes[name], (0,) * tensor.dim(), tensor.shape, tensor.detach())
            fill(whole, source, what=str(directory))
        materialize(model, tensors)
        return model

    return load_model
