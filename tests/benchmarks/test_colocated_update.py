"""The benchmark of updates on a CPU: every byte is sent, and an engine over two ranks takes from both."""

from __future__ import annotations

import math
import subprocess
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.colocated_update import SHAPES, measure
from benchmarks.report import Report
from benchmarks.steps import TINY
from corerl_testing.pool import OneRank, RankPool
from tests.forks.server import forking


def parameters(fields: dict[str, object]) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    return sum(param.numel() for param in model.parameters())


def report(split: bool, apart: bool = False, engine: str = "bare") -> Report:
    with mock.patch.object(subprocess.Popen, "__init__", forking(subprocess.Popen.__init__)):
        return measure(
            "0.6b", backend="fsdp", engine=engine, rounds=2, bucket_mib=0.02, split=split, apart=apart, tiny=True
        )


def test_shapes_have_the_sizes_that_they_are_named_by() -> None:
    assert parameters({**SHAPES["0.6b"]}) == pytest.approx(0.596e9, rel=1e-3)
    assert parameters({**SHAPES["8b"]}) == pytest.approx(8.19e9, rel=1e-3)


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_sends_all_parameters_and_stands_beside_the_engines_load(
    world_size: int, rank_pool: RankPool
) -> None:
    found, *_ = OneRank().run(report, False) if world_size == 1 else rank_pool.run(report, True)
    (comparison,) = found.comparisons
    assert comparison.target == 1.5 and len(comparison.ours) == len(comparison.other) == 2
    rates = next(number.values for number in found.numbers if number.unit == "GB/s")
    sent = 2 * parameters({**SHAPES["0.6b"], **TINY})
    assert rates == pytest.approx([sent / seconds / 1e9 for seconds in comparison.ours])
    parts = {number.what: number.values for number in found.numbers if number.what.startswith("in it: ")}
    assert {"in it: gather", "in it: send", "in it: wait for room"} < parts.keys()
    for number, took in enumerate(comparison.ours):
        assert math.fsum(values[number] for values in parts.values()) <= took


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    ("engine", "against"),
    [
        ("bare", "a broadcast of the bytes"),
        ("sglang", "the stand-in's load of ready buckets and a broadcast of the bytes"),
    ],
)
def test_an_update_of_engines_elsewhere_stands_beside_a_broadcast_of_as_many_bytes(
    rank_pool: RankPool, engine: str, against: str
) -> None:
    found, other = rank_pool.run(report, False, True, engine)
    (comparison,) = found.comparisons
    assert (comparison.against, comparison.target) == (against, 1.4)
    held = "The engines of both sides held the weights they were sent." in found.note
    assert held == (engine == "sglang")
    rates = next(number.values for number in found.numbers if number.unit == "GB/s")
    sent = 2 * parameters({**SHAPES["0.6b"], **TINY})
    assert rates == pytest.approx([sent / seconds / 1e9 for seconds in comparison.ours])
    assert all(took > 0 for took in comparison.other)
    # The second rank has gathered, and sent nothing.
    assert next(number.values for number in other.numbers if number.unit == "GB/s") == [0.0, 0.0]
