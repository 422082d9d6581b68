"""A server whose model has adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types

from corerl_tinker.requests import Refused
from plugins.tinker.tests.served import LORA, MODEL, Served, create, model_wanted, save, serving, train, weights_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("adapters"), LORA) as found:
        yield found


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"base_model": "huge"}, "base_model='huge' is not served here; 'tiny' is"),
        ({"rank": 32}, "rank=32, but adapters here have rank 4"),
        ({"seed": 5}, "seed=5, but adapters here have seed 0"),
        ({"train_mlp": False}, "train_mlp=False, but adapters here have train_mlp True"),
        ({"optimizer_config": types.DimuonOptimizerConfig()}, "optimizer 'dimuon' is not served"),
    ],
)
def test_a_model_that_would_differ_silently_is_refused(
    wanted: Mapping[str, Any], sentence: str, served: Served
) -> None:
    of_request = {name: wanted[name] for name in wanted.keys() & {"base_model", "optimizer_config"}}
    adapters = {name: wanted[name] for name in wanted.keys() - of_request.keys()}
    asked = model_wanted(**{"rank": 4, **adapters}).model_copy(update=of_request)
    with pytest.raises(Refused, match=sentence):
        create(served.policy, asked, "d:train:0")


def test_adapters_alone_are_trained_and_resumed(served: Served) -> None:
    served.policy.release()
    made = create(served.policy, model_wanted(4), "f:train:0")
    assert (made.base_model, made.lora_rank, made.is_lora) == (MODEL, 4, True)
    policy, before = served.policy, weights_of(served)
    losses = train(policy, 2)
    changed = {name for name, value in weights_of(served).items() if not torch.equal(value, before[name])}
    assert changed and all("lora" in name for name in changed)
    path = save(policy, "two", overwrite=True).tinker_path
    losses += train(policy, 2)
    served.new_model("f:train:1", rank=4)
    policy.load(path, optimizer=True)
    assert losses[2:] == train(policy, 2)


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
