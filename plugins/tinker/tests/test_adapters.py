"""A server whose model has adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from corerl_tinker.requests import Refused
from plugins.tinker.tests.served import LORA, MODEL, create, model_wanted, save, serving, train

WRONG: Sequence[tuple[Mapping[str, Any], str]] = (
    ({"base_model": "huge"}, "base_model='huge' is not served here; 'tiny' is"),
    ({"rank": 32}, "rank=32, but adapters here have rank 4"),
    ({"seed": 5}, "seed=5, but adapters here have seed 0"),
    ({"train_mlp": False}, "train_mlp=False, but adapters here have train_mlp True"),
)


def test_a_model_that_would_differ_silently_is_refused(tmp_path: Path) -> None:
    dimuon = {"optimizer_config": types.DimuonOptimizerConfig()}
    with serving(tmp_path, LORA) as served:
        for wanted, sentence in WRONG:
            with pytest.raises(Refused, match=sentence):
                create(served.policy, model_wanted(**{"rank": 4, **wanted}), "d:train:0")
        with pytest.raises(Refused, match="optimizer 'dimuon' is not served"):
            create(served.policy, model_wanted(4).model_copy(update=dimuon), "d:train:0")


def test_a_checkpoint_of_another_rank_is_refused_before_ranks_end(tmp_path: Path) -> None:
    with serving(tmp_path, LORA) as served:
        made = create(served.policy, model_wanted(4), "a:train:0")
        assert (made.base_model, made.lora_rank, made.is_lora) == (MODEL, 4, True)
        path = save(served.policy, "four", overwrite=True).tinker_path
    with serving(tmp_path, {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}) as other:
        other.new_model("a:train:1")  # as one that is resumed, it asks for nothing but what its checkpoint has
        with pytest.raises(Refused, match="has adapters of rank 4, and this server trains adapters of rank 2"):
            other.policy.load(path, optimizer=True)
        assert len(train(other.policy, 1)) == 1
        other.policy.release()
        with pytest.raises(Refused, match="train_mlp=True, but adapters here have train_mlp False"):
            create(other.policy, model_wanted(2), "a:train:2")
