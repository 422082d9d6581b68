"""Models with every kind of layer, packed or on padded rows, follow the plain backend on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config import ClusterInfo, TrainConfig
from corerl.plugin import Problem
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.spec import check
from corerl_testing import TRAIN, Runs, Setup, assert_follows, different, drawn_model, error_of, smallest_config, start

STEPS = range(3)


def setup_of(backend: str, model: Path, **train_fields: Any) -> Setup:
    setup = Setup(backend=backend, model=str(model), train=evolve(TRAIN, **train_fields))
    return setup.packed_by(80)  # a few micro-batches of a few rows


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [("gemma2", "whole"), ("gpt_oss", "packed"), ("qwen3_5_text", "packed"), ("bloom", "whole")],
)
def test_every_kind_of_attention_follows_the_plain_backend(
    runs: Runs, tmp_path: Path, model_type: str, layout: str
) -> None:
    drawn_model(smallest_config(model_type)).save_pretrained(tmp_path)
    found = runs.train(2, setup_of("fsdp", tmp_path, layout=layout), STEPS)
    assert_follows(found, runs.train(1, setup_of("plain", tmp_path), STEPS))
    recomputed = runs.train(2, setup_of("fsdp", tmp_path, layout=layout, recompute="full"), STEPS)
    assert recomputed.losses == found.losses and different(recomputed.state, found.state) == []


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])  # whose head is a matrix, and more than that
def test_padding_of_the_vocabulary_is_left_out(runs: Runs, tmp_path: Path, model_type: str) -> None:
    drawn_model(smallest_config(model_type, vocab_size=130)).save_pretrained(tmp_path)
    found = runs.train(2, evolve(setup_of("fsdp", tmp_path), vocabulary=97), STEPS)
    assert_follows(found, runs.train(1, evolve(setup_of("plain", tmp_path), vocabulary=97), STEPS))


def test_compiled_layers_are_refused_for_a_whole_model(runs: Runs) -> None:
    options, asked = FsdpConfig(compile=True), ClusterInfo(device="cpu", ranks=2, train=TrainConfig(layout="whole"))
    text = (
        "true with train.layout='whole', whose layers are transformers' own code, is not supported; set it to false, "
        "or use a model that can be packed"
    )
    assert list(check(options, asked)) == [Problem("compile", text)]
    assert list(check(FsdpConfig(), asked)) == []
    assert list(check(options, evolve(asked, train=TrainConfig(layout="packed")))) == []
    setup = evolve(setup_of("fsdp", runs.models["qwen3"], layout="whole"), options={"compile": True})
    assert runs.rank_sets[1].run(error_of, lambda: start(setup)) == [f"Unsupported: compile = {text}"]
