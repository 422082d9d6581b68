"""Models with every kind of layer, packed or on padded rows, follow the plain backend on two ranks in every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl_testing import Runs, Setup, assert_follows, drawn_model, smallest_config

STEPS = range(3)


@pytest.mark.parametrize(
    ("model_type", "layout"), [("gemma2", "whole"), ("gpt_oss", "packed"), ("qwen3_5_text", "packed")]
)
def test_windows_caps_sinks_and_states_follow_the_plain_backend(
    runs: Runs, tmp_path: Path, model_type: str, layout: str
) -> None:
    drawn_model(smallest_config(model_type)).save_pretrained(tmp_path)
    plain = Setup(backend="plain", model=str(tmp_path)).packed_by(80)  # a few micro-batches of a few rows
    wanted = runs.train(1, plain, STEPS)
    for stage in (2, 3):  # stage 1 and 2 gather alike
        train = evolve(plain.train, layout=layout)
        found = runs.train(2, evolve(plain, backend="deepspeed", options={"stage": stage}, train=train), STEPS)
        assert_follows(found, wanted)


def test_padding_of_the_vocabulary_is_left_out(runs: Runs, tmp_path: Path) -> None:
    drawn_model(smallest_config("qwen3", vocab_size=130)).save_pretrained(tmp_path)
    plain = evolve(Setup(backend="plain", model=str(tmp_path)).packed_by(80), vocabulary=97)
    assert_follows(runs.train(2, evolve(plain, backend="deepspeed"), STEPS), runs.train(1, plain, STEPS))
