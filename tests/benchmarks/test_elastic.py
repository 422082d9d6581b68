"""The benchmark of groups that change size and heal: its arithmetic and what it writes; groups themselves take longer
than a test should."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.elastic import SHAPES, Found, Watching, arguments, most_parameters, parameters, write_samples
from benchmarks.report import Comparison, Number, Report, finish, load
from corerl.rollout.recorded import SavedRollouts


def test_the_largest_shape_leaves_room_for_one_rank_beside_one_of_two() -> None:
    sizes = {name: parameters(name) for name in SHAPES}
    assert {name: round(size / 1e9, 1) for name, size in sizes.items()} == {
        "tiny": 0.0,
        "1b": 1.1,
        "3b": 3.1,
        "4b": 4.0,
    }
    # Masters and moments: 12 bytes a parameter on the single rank, 6 on each of two.
    assert (12 + 6) * sizes["4b"] < 80e9 - 6e9 < (12 + 6) * 1.05 * sizes["4b"]
    assert most_parameters(80e9) == pytest.approx(4.11e9, rel=1e-3)


def test_later_rows_replace_earlier_ones_and_the_file_is_always_whole(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    finish(Report(name="elastic", size="tiny"), str(output))
    found = Found(output)
    found.add(Number(what="heal", values=[3.0], unit="s"), note="First.")
    found.add(Comparison(what="step", against="without", ours=[2.0], other=[1.0]))
    found.add(Comparison(what="step", against="without", ours=[2.0, 3.0], other=[1.0, 1.0]), note="Second.")
    found.require(False, "gradient norms")
    report = load(output)
    assert [(each.what, each.ratios) for each in report.comparisons] == [("step", [2.0, 3.0])]
    assert [(each.what, each.values) for each in report.numbers] == [("heal", [3.0])]
    assert report.note == "First. Second. RESULTS DIFFER: gradient norms."


def test_a_phase_of_new_ranks_ends_with_the_last_of_them() -> None:
    watching = Watching(began=10.0)
    # The second rank was imported later: until then the first one waits in its load, and nothing moves.
    watching.ends = [{"import": 12.0, "load": 21.0}, {"import": 15.0, "load": 20.0}]
    assert watching.seconds == {"import": 5.0, "load": 6.0}


def test_saved_samples_are_read_as_those_of_a_run_that_samples(tmp_path: Path) -> None:
    args = arguments(["--tiny"])
    write_samples(args, tmp_path, 2)
    source = SavedRollouts(tmp_path, steps=2, vocab_size=SHAPES["tiny"]["vocab_size"])
    scored = [asyncio.run(source.next()) for _ in range(3)]
    assert [each and each.step for each in scored] == [0, 1, None]
    assert scored[0] is not None and scored[1] is not None
    batch = scored[1].rollout.batch
    assert len(batch.tokens) == args.tokens and set(batch.lengths) == {args.sequence}
    assert batch.columns["loss_mask"].sum() == batch.rows["response_length"].sum()
    assert (scored[0].rewards != scored[1].rewards).any()
