"""What a GPU without TransformerEngine costs is told, and what that leaves to plain torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from attrs import evolve

from corerl.config import ClusterInfo, TrainConfig
from corerl.kinds import InPieces, ModelSize
from corerl_megatron.config import MegatronConfig
from corerl_megatron.slow import INSTALL, WITHOUT_ENGINE
from corerl_megatron.spec import SPEC
from corerl_testing import smallest_config

SIZE = ModelSize(layers=(10,), experts=(0,), embedding=4, head=4, rest=1, hidden=2)
GPU = ClusterInfo(device="cuda", ranks=2, train=TrainConfig(precision="bfloat16"))
MISTRAL = smallest_config("mistral").to_dict()


@pytest.fixture(params=[True, False], ids=["with TransformerEngine", "without"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        return (request.param or None) if name == "transformer_engine" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    return bool(request.param)


def told(
    *, cluster: ClusterInfo = GPU, in_pieces: InPieces | None = None, model: Any = None, **options: Any
) -> dict[str, str]:
    """By the path of the setting."""
    cluster = evolve(cluster, model=model or {})
    found = SPEC.slow(MegatronConfig(**options), cluster, evolve(SIZE, in_pieces=in_pieces))
    return {each.path: f"{each.text}; {each.price}; {each.instead}" for each in found}


def test_only_a_machine_without_transformer_engine_is_told(installed: bool) -> None:
    line = f"layers are plain torch, because TransformerEngine is not installed; {WITHOUT_ENGINE}; {INSTALL}"
    assert told() == ({} if installed else {"transformer": line})
    assert told(cluster=evolve(GPU, elsewhere=True)) == {}


def test_attention_that_is_left_to_plain_torch_is_told(installed: bool) -> None:
    beside = set() if installed else {"transformer"}
    assert told(in_pieces=InPieces.SINKS).keys() == {".model"} | beside
    assert told(in_pieces=InPieces.HEADS).keys() == (set() if installed else {".model", "transformer"})
    over_ranks = set() if installed else {"context_parallel"}
    assert told(context_parallel=2).keys() == beside | over_ranks
    assert told(model=MISTRAL, context_parallel=2).keys() == {"context_parallel"} | beside
    assert told(model=MISTRAL).keys() == beside
