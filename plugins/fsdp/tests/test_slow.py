"""Layers that "auto" does not compile on a GPU are told, with why, the price, and what would avoid it."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from corerl.config import ClusterInfo, TrainConfig
from corerl.kinds import InPieces, ModelSize
from corerl.plugin import UNMEASURED
from corerl_fsdp import slow as module
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.slow import IN_FLOAT32, IN_PIECES, NOT_COMPILED
from corerl_fsdp.spec import SPEC

SIZE = ModelSize(layers=(10,), experts=(0,), embedding=4, head=4, rest=1, hidden=2)
GPU = ClusterInfo(device="cuda", ranks=1, train=TrainConfig(precision="bfloat16", layout="packed"))
NO_COMPILER = "there is no C compiler for Triton (gcc, clang, or the one that CC names)"


def told(
    monkeypatch: pytest.MonkeyPatch,
    *,
    train: TrainConfig | None = None,
    in_pieces: InPieces | None = None,
    compiles: Any = "auto",
    lacks: str = "",
    elsewhere: bool = False,
) -> list[str]:
    monkeypatch.setattr(module, "why_unbuildable", lambda: lacks)
    cluster = evolve(GPU, train=train or GPU.train, elsewhere=elsewhere)
    found = SPEC.slow(FsdpConfig(compile=compiles), cluster, evolve(SIZE, in_pieces=in_pieces))
    return [f"{each.text}; {each.price}; {each.instead}" for each in found if each.path == "compile"]


def test_compiled_layers_and_chosen_plain_ones_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert told(monkeypatch) == []
    for asked in (True, False):
        assert told(monkeypatch, compiles=asked, lacks=NO_COMPILER, train=TrainConfig(precision="float32")) == []


def test_only_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = told(monkeypatch, lacks=NO_COMPILER)
    assert line.startswith(f"'auto' does not compile layers, because {NO_COMPILER}; {NOT_COMPILED}; install that, or ")
    assert told(monkeypatch, lacks=NO_COMPILER, elsewhere=True) == []


def test_float32_attention_in_pieces_and_whole_models_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = told(monkeypatch, train=TrainConfig(precision="float32"))
    assert line == (
        f"'auto' does not compile layers, because float32 has no kernel for packed attention; {IN_FLOAT32}; "
        "set train.precision to 'bfloat16'; true compiles layers without their attention"
    )
    (line,) = told(monkeypatch, in_pieces=InPieces.SINKS)
    assert line == (
        f"'auto' does not compile layers, because attention is not one kernel: it has sinks; {IN_PIECES}; true "
        "compiles layers without their attention"
    )
    (line,) = told(monkeypatch, train=TrainConfig(precision="bfloat16", layout="whole"))
    why = "because the model is whole, on padded rows"
    assert line.startswith(f"'auto' does not compile layers, {why}; {UNMEASURED}; only a model that can be packed ")
