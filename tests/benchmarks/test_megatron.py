"""The benchmark of the Megatron backend on a CPU: its bare loop beside the plugin, and two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from attrs import asdict, evolve

from benchmarks.megatron import CASES, measure_bare, measure_layout, show
from benchmarks.report import Report
from benchmarks.steps import DIFFERENT
from corerl_testing.pool import OneRank, RankPool
from tests.benchmarks.test_steps import without_memory


def bare_report() -> Report:
    return measure_bare(CASES["bf16"].tiny, name="bf16", rounds=1)


@pytest.mark.processes
def test_plugin_and_bare_loop_take_the_same_steps_and_the_table_has_both(tmp_path: Path) -> None:
    (report,) = OneRank().run(bare_report)
    assert DIFFERENT not in report.note  # the norms of their gradients
    off, on = report.comparisons
    assert (off.target, on.target) == (1.031, None)  # 0.97 of the bare loop's speed
    rates = [number.values for number in report.numbers if "tokens a second" in number.what]
    steps = [off.ours, off.other, on.ours, on.other]
    assert rates == [pytest.approx([256 / seconds / 1e3 for seconds in each]) for each in steps]
    (tmp_path / "bf16.json").write_text(json.dumps({"report": asdict(report)}))
    text = show([tmp_path / "bf16.json"])
    assert all(number.what in text for number in report.numbers)


def test_a_layout_sends_every_weight_once_and_trains_on_after_sleep(rank_pool: RankPool, tmp_path: Path) -> None:
    case = evolve(CASES["tp2-dp2"].tiny, ranks=2)
    found = rank_pool.run(measure_layout, case, "tp2", 1, False, True)[0]
    assert found.tokens == 4 * 4 * 32
    assert found.update_bytes == 4 * sum(param.numel() for param in without_memory(case).parameters())
    assert all(math.isfinite(norm) for norm in found.norms)
    assert len(found.peaks) == len(found.outside) == 2
    (tmp_path / "tp2.json").write_text(json.dumps({"laid": asdict(found)}))
    assert "| tp2: 8B shape" in show([tmp_path / "tp2.json"])
