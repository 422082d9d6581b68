"""A server whose model has adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    ],
)
def test_a_model_that_would_differ_silently_is_refused(
    wanted: Mapping[str, Any], sentence: str, served: Served
) -> None:
    served.policy.release()
    with pytest.raises(Refused, match=sentence):
        create(served.policy, model_wanted(**{"rank": 4, **wanted}), "d:train:0")


def test_an_optimizer_that_is_not_served_is_refused(served: Served) -> None:
    other = types.CreateModelRequest.model_validate(
        {"session_id": "a", "model_seq_id": 0, "base_model": MODEL, "optimizer_config": {"type": "dimuon"}}
    )
    with pytest.raises(Refused, match="optimizer 'dimuon' is not served"):
        create(served.policy, other, "d:train:0")


def test_a_client_learns_the_rank(served: Served) -> None:
    served.policy.release()
    made = create(served.policy, model_wanted(4), "e:train:0")
    assert (made.base_model, made.lora_rank, made.is_lora) == (MODEL, 4, True)


def test_adapters_alone_are_trained_and_resumed(served: Served) -> None:
    served.new_model("f:train:0", rank=4)
    policy, before = served.policy, weights_of(served)
    losses = train(policy, 2)
    changed = {name for name, value in weights_of(served).items() if not torch.equal(value, before[name])}
    assert changed and all("lora" in name for name in changed)
    path = save(policy, "two", overwrite=True).tinker_path
    losses += train(policy, 2)
    served.new_model("f:train:1", rank=4)
    policy.load(path, optimizer=True)
    assert losses[2:] == train(policy, 2)
