"""The benchmark of an FSDP step on a CPU: plugin and bare loop take the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from benchmarks.fsdp_gpu import CASES, measure
from benchmarks.report import Report, load
from benchmarks.steps import DIFFERENT, PEAK, flops
from corerl_testing.pool import OneRank


def measured(case: str, output: str) -> Report:
    return measure(evolve(CASES[case].tiny, micro_batches=2), rounds=2, output=output)


@pytest.mark.processes
@pytest.mark.parametrize(("case", "tokens"), [("slice", 512), ("0.6b", 2048)])
def test_plugin_and_bare_loop_take_the_same_steps_and_the_file_has_both(tmp_path: Path, case: str, tokens: int) -> None:
    (report,) = OneRank().run(measured, case, str(tmp_path / "fsdp.json"))
    assert report == load(tmp_path / "fsdp.json")
    assert DIFFERENT not in report.note  # the norms of their gradients
    (compared,) = report.comparisons
    assert compared.target == 1.031  # 0.97 of the bare loop's speed
    rates = {number.what: number.values for number in report.numbers}
    assert rates["the plugin: tokens a second"] == pytest.approx([tokens / each / 1e3 for each in compared.ours])
    assert rates["the bare loop: tokens a second"] == pytest.approx([tokens / each / 1e3 for each in compared.other])


def test_mfu_is_what_an_earlier_measurement_of_the_same_slice_says() -> None:
    work = flops(CASES["slice"].fields, CASES["slice"].samples(1))
    assert 33.1e3 * work / 16384 / PEAK == pytest.approx(0.448, abs=1e-3)  # 16k tokens at 33.1k a second: 44.8 %
