"""Configs with which nothing can be served, or not what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from corerl.errors import ConfigError
from corerl_tinker.requests import Refused
from plugins.tinker.tests.served import LORA, create, model_wanted, save, serving, train


def test_a_server_whose_sums_would_be_means_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm.aggregation"):
        with serving(tmp_path, {"algorithm": {"aggregation": "sequence-mean"}}):
            pytest.fail("it has started")


def test_a_checkpoint_of_another_rank_is_refused_before_ranks_end(tmp_path: Path) -> None:
    with serving(tmp_path, LORA) as served:
        served.new_model("a:train:0", rank=4)
        path = save(served.policy, "four", overwrite=True).tinker_path
    with serving(tmp_path, {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}) as other:
        other.new_model("a:train:1")  # as one that is resumed, it asks for nothing but what its checkpoint has
        with pytest.raises(Refused, match="has adapters of rank 4, and this server trains adapters of rank 2"):
            other.policy.load(path, optimizer=True)
        assert len(train(other.policy, 1)) == 1
        other.policy.release()
        with pytest.raises(Refused, match="train_mlp=True, but adapters here have train_mlp False"):
            create(other.policy, model_wanted(2), "a:train:2")
