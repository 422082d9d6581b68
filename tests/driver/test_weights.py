"""A checkpoint that lacks a tensor, or has it in another shape, is told before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.driver.weights import require_same_model
from corerl.errors import CheckpointError
from corerl.models.config import hf_config
from tests.driver.saved import make_config, make_model, save


def test_a_checkpoint_must_hold_every_tensor_of_the_model_in_its_shape(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=2)
    fields = dict(config.model.config)

    def require(**changes: Any) -> None:
        require_same_model(checkpoint, "actor", hf_config(evolve(config.model, config={**fields, **changes})))

    require()
    with pytest.raises(CheckpointError, match=r"has \[16, 32\] for 'model.embed_tokens.weight'.* needs \[19, 32\]"):
        require(vocab_size=19)
    with pytest.raises(CheckpointError, match=r"lacks 'lm_head.weight', this run's actor needs \[16, 32\]"):
        require(tie_word_embeddings=False)


def test_a_checkpoint_must_hold_every_role(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=2)
    with pytest.raises(CheckpointError, match=r"step-00000002 has no critic, but this run does; resume with"):
        require_same_model(checkpoint, "critic", hf_config(config.model))
