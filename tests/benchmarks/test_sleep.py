"""The benchmark of sleep on a CPU: both sides move every byte, every bit is compared, and the file is there early."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import sleep
from benchmarks.report import load
from corerl_testing.pool import OneRank


def measured(output: str) -> tuple[int, list[float]]:
    """Bytes that both sides moved, and a number that the file had before the last round was over."""
    seen: list[float] = []
    compared = sleep.compared

    def looks(tensors: Sequence[torch.Tensor], wanted: Sequence[int], who: str) -> float:
        seen.append(len(load(Path(output)).numbers))
        return compared(tensors, wanted, who)

    with mock.patch.object(sleep, "compared", looks):
        report = sleep.measure(layers=0, rounds=2, tiny=True, output=output)
    assert report == load(Path(output))
    rates = {each.what: each.values[0] for each in report.numbers}
    ours = report.comparisons[0].ours
    return round(rates["to host, CoreRL"] * 1e9 * (ours[0] + ours[1]) / 2), seen


def test_both_sides_move_weights_and_moments_and_results_are_written_on_the_way(tmp_path: Path) -> None:
    ((nbytes, seen),) = OneRank().run(measured, str(tmp_path / "sleep.json"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sleep.fields_of(layers=0, tiny=True)))
    assert nbytes == pytest.approx(3 * 4 * sum(param.numel() for param in model.parameters()), rel=1e-3)
    assert len(seen) == 4 and min(seen) >= 5


def test_a_side_that_loses_a_bit_is_named() -> None:
    tensors = [torch.ones(3), torch.zeros(2)]
    sums = sleep.bits(tensors)
    tensors[1][1] = -0.0
    with pytest.raises(AssertionError, match="the bare loop did not restore every bit"):
        sleep.compared(tensors, sums, "the bare loop")
