"""The benchmark of the DeepSpeed backend on CPUs: its bare loop beside the plugin, in turns and apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import asdict, evolve

from benchmarks.deepspeed import BARE, CASES, PLUGIN, WARM_UP, WATCHED, Found, Side, measure, report, show, starts_of
from benchmarks.steps import DIFFERENT, PEAK, flops
from corerl_testing.pool import RankPool


def test_plugin_and_bare_loop_take_the_same_steps_in_turns_and_the_table_has_both(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    case = CASES["8b-zero3"].tiny
    found = rank_pool.run(measure, case, "8b-zero3", [PLUGIN, BARE], 1)[0]
    plugin, bare = found.sides
    assert len(plugin.norms) == len(bare.norms) == WARM_UP + 1
    assert plugin.norms == pytest.approx(bare.norms, rel=1e-5)
    assert len(set(plugin.norms)) == WARM_UP + 1  # each step had other weights
    assert all(freed > 0 and left < 1e-6 for _, freed, left, _ in plugin.sleeps)
    (tmp_path / "8b-zero3.json").write_text(json.dumps(asdict(found)))
    made = report([found])
    assert DIFFERENT not in made.note
    tokens = 2 * 4 * 2 * 32  # ranks, micro-batches, samples, tokens of a sample
    (compared,) = made.comparisons
    assert (compared.ours, compared.other, compared.target) == (plugin.steps, bare.steps, 1.031)
    values = {number.what: number.values for number in made.numbers}
    assert values[f"{PLUGIN}: tokens a second"] == [tokens / plugin.steps[0] / 1e3]
    work = flops(case.fields, case.samples(2))
    assert values[f"{BARE}: MFU"] == [pytest.approx(100 * work / bare.steps[0] / 2 / PEAK)]
    text = show([tmp_path / "8b-zero3.json"])
    assert all(number.what in text for number in made.numbers)


@pytest.mark.parametrize(("name", "awake"), [("offload", 0), ("offload-stage3", 2)])
def test_apart_they_take_the_same_steps_too(rank_pool: RankPool, name: str, awake: int) -> None:
    case = evolve(CASES[name].tiny, ranks=2)
    starts = [rank_pool.run(measure, case, name, [who], 1, awake)[0] for who in (PLUGIN, BARE)]
    (plugin,), (bare,) = (found.sides for found in starts)
    assert plugin.norms == pytest.approx(bare.norms, rel=1e-5)
    assert len(plugin.norms) == WARM_UP + awake + 1
    made = report(starts)
    assert DIFFERENT not in made.note
    assert [(each.ours, each.other) for each in made.comparisons] == [(plugin.steps, bare.steps)]
    told = {number.what: list(number.values) for number in made.numbers if "first sleep" in number.what}
    early = [[row[column] for row in plugin.early] for column in range(len(WATCHED))]
    words = [f"{PLUGIN}, before its first sleep: {what}" for what, _ in WATCHED]
    assert told == (dict(zip(words, early, strict=True)) if awake else {})


def test_what_comes_first_changes_and_each_start_has_a_file_of_its_own() -> None:
    starts = starts_of("offload", apart=True, turns=2, output=Path("found"))
    assert [start.who for start in starts] == ["plugin", "bare", "bare", "plugin"]
    assert len({start.file for start in starts}) == 4
    (together,) = starts_of("stage3", apart=False, turns=2, output=Path("found"))
    assert (together.who, together.file) == ("both", Path("found/stage3.json"))


def start_of(*sides: Side) -> Found:
    return Found(
        name="stage3",
        what="a shape",
        size="small",
        ranks=2,
        tokens=1000,
        flops=PEAK,
        precision="bfloat16",
        apart=True,
        sides=list(sides),
        facts={},
    )


def test_gradients_that_differ_are_told_and_a_side_that_is_missing_compares_with_nothing() -> None:
    ours, its = Side(who=PLUGIN, steps=[2.0, 1.0], norms=[1.0] * 3), Side(who=BARE, steps=[1.0], norms=[1.0] * 3)
    made = report([start_of(ours), start_of(its)])
    assert [each.ratios for each in made.comparisons] == [[2.0]]  # of rounds that both have
    assert {number.what: number.values for number in made.numbers}[f"{PLUGIN}: MFU"] == [25.0, 50.0]
    assert DIFFERENT not in made.note
    assert DIFFERENT in report([start_of(ours), start_of(evolve(its, norms=[1.0, 1.0, 1.2]))]).note
    alone = report([start_of(ours)])
    assert (alone.comparisons, DIFFERENT in alone.note) == ([], False)
