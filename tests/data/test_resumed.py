"""What a resumed run draws is compared with what the run before drew, and with what it would have drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from corerl.config.schema import DataConfig, DataSource
from corerl.data.prompts import PromptSource, PromptStream
from corerl.data.rows import load_prompts
from corerl.plan.resume import resume_data
from tests.data.files import load, write

OLD = [f"p{n}" for n in range(20)]
NEW = [f"q{n}" for n in range(8)]


def rows(path: Path, texts: Sequence[str]) -> Path:
    return write(path, *(json.dumps({"prompt": text}) for text in texts))


@define
class Drawing:
    """A run, as far as it draws prompts."""

    source: PromptSource
    stream: PromptStream
    lines: list[str]
    differs: str

    def draw(self, count: int) -> list[str]:
        return [prompt.text for prompt in self.stream.take(count)]

    @property
    def held_out(self) -> list[str]:
        return [prompt.text for prompt in self.source.held_out_prompts()]

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"data": self.source.record, "source": {"prompts": self.stream.position}}
        return json.loads(json.dumps(state))


def begun(source: PromptSource, state: dict[str, Any] | None = None, *, seed: int = 0) -> Drawing:
    """A run, fresh or from a checkpoint's `state`."""
    lines, differs = resume_data(source, state, seed=seed) if state else ([], "")
    stream = PromptStream(source, seed=seed)
    if state:
        assert stream.restore(state["source"]["prompts"]) is not bool(differs)
    return Drawing(source=source, stream=stream, lines=lines, differs=differs)


@pytest.fixture
def first(tmp_path: Path) -> Drawing:
    """A run on the old rows, of which it has drawn 6 of 16."""
    run = begun(load(rows(tmp_path / "old.jsonl", OLD), held_out=4))
    run.draw(6)
    return run


@pytest.fixture
def resumed(tmp_path: Path, first: Drawing) -> Any:
    def resume(texts: Sequence[str], *, held_out: int = 4, seed: int = 0) -> Drawing:
        return begun(load(rows(tmp_path / "now.jsonl", texts), held_out=held_out), first.state, seed=seed)

    return resume


def test_the_same_rows_go_on_without_a_line(first: Drawing, resumed: Any) -> None:
    again = resumed(OLD)
    assert (again.lines, again.differs) == ([], "")
    assert again.source.record == first.source.record
    assert again.draw(50) == first.draw(50)


def test_the_same_rows_in_another_order_are_drawn_as_before(first: Drawing, resumed: Any) -> None:
    turned = resumed(OLD[::-1])
    assert turned.lines == ["data: the rows are in another order than in the checkpoint, whose order is kept"]
    assert turned.held_out == first.held_out
    assert turned.draw(50) == first.draw(50)


@pytest.mark.parametrize("texts", [OLD + NEW, NEW + OLD, [*OLD[::-1], *NEW]])
def test_added_rows_come_at_the_end_of_the_epoch(first: Drawing, resumed: Any, texts: list[str]) -> None:
    more = resumed(texts)
    assert "data: new rows: 8; they come at the end of this epoch" in more.lines and not more.differs
    assert more.held_out == first.held_out
    assert more.draw(10) == first.draw(10)  # the rest of the epoch
    assert sorted(more.draw(8)) == NEW
    for _ in range(2):
        epoch = more.draw(24)
        assert sorted(epoch) == sorted([*set(OLD) - set(first.held_out), *NEW])
        assert {*epoch[:16]} & {*NEW}  # not at the end of it


@pytest.mark.parametrize("drawn", [0, 4, 10, 13, 18, 30, 70])
def test_a_run_with_added_rows_is_resumed_where_it_stood(
    first: Drawing, resumed: Any, tmp_path: Path, drawn: int
) -> None:
    more = resumed(OLD + NEW)
    more.draw(drawn)
    later = begun(load(rows(tmp_path / "later.jsonl", (OLD + NEW)[::-1]), held_out=4), more.state)
    assert not later.differs and later.source.record == more.source.record
    assert later.draw(60) == more.draw(60)
    # And once more, with further rows in the same epoch.
    last = ["r0", "r1"]
    further = begun(load(rows(tmp_path / "further.jsonl", [*OLD, *NEW, *last]), held_out=4), later.state)
    following, expected = further.draw(90), later.draw(90)
    rest = next(n for n, text in enumerate(following) if text in last)
    assert following[:rest] == expected[:rest]
    assert sorted(following[rest : rest + 2]) == last


def test_an_added_copy_of_a_held_out_row_is_skipped(first: Drawing, resumed: Any) -> None:
    trained = next(text for text in OLD if text not in first.held_out)
    more = resumed([*OLD, *first.held_out, trained])
    assert more.lines == ["data: new rows: 1; they come at the end of this epoch"]
    assert not {*more.draw(60)} & {*first.held_out}
    assert more.source.copies == 4


def test_further_rows_are_held_out_of_untrained_ones(first: Drawing, resumed: Any) -> None:
    more = resumed(OLD + NEW, held_out=9)
    assert not more.differs and "data: new rows that are held out: 5" in more.lines
    assert more.held_out[:4] == first.held_out and {*more.held_out[4:]} < {*NEW}
    assert more.draw(10) == first.draw(10)
    assert not {*more.draw(60)} & {*more.held_out}


@pytest.mark.parametrize(
    ("texts", "held_out", "said"),
    [
        (NEW, 4, ["8 of 8 rows are new, 20 of 20 are gone"]),
        (OLD[:15], 4, ["0 of 15 rows are new, 5 of 20 are gone"]),
        ([*OLD[1:], "p0, edited"], 4, ["1 of 20 rows are new, 1 of 20 are gone"]),
        (OLD, 6, ["rows that were trained on and are held out now: 2"]),
        (OLD, 1, ["rows that were held out and are trained on now: 3"]),
        (
            OLD + NEW,
            14,
            ["8 of 28 rows are new, 0 of 20 are gone", "rows that were trained on and are held out now: 2"],
        ),
    ],
)
def test_other_rows_are_told_and_begin_at_their_first_prompt(
    first: Drawing, resumed: Any, texts: list[str], held_out: int, said: list[str]
) -> None:
    other = resumed(texts, held_out=held_out)
    assert other.lines == [] and other.differs.split("; ")[: len(said)] == said
    assert {*other.held_out} >= {*first.held_out[:held_out]} & {*texts}
    train = {*texts} - {*other.held_out}
    epochs = [other.draw(len(train)) for _ in range(2)]
    assert {*epochs[0]} == {*epochs[1]} == train
    assert epochs[0] != epochs[1]


def test_begun_anew_the_checkpoints_positions_mean_the_beginning_again(first: Drawing, resumed: Any) -> None:
    """As for ranks that are restarted from the checkpoint that the run itself resumed from."""
    other = resumed(NEW)
    drawn = other.draw(30)
    other.stream.restore(first.state["source"]["prompts"])
    assert other.draw(30) == drawn
    # Its own checkpoints are of these data, and go on.
    later = begun(load(rows_of(other), held_out=4), other.state)
    assert (later.lines, later.differs) == ([], "")
    assert later.draw(30) == other.draw(30)


def rows_of(run: Drawing) -> str:
    where: str = run.source.where(0)
    return where.rpartition(":")[0]


def test_copies_of_one_row_go_on_and_grow(tmp_path: Path) -> None:
    one = begun(load(rows(tmp_path / "a.jsonl", ["p"] * 6), held_out=2))
    one.draw(3)
    again = begun(load(rows(tmp_path / "a.jsonl", ["p"] * 6), held_out=2), one.state)
    assert (again.lines, again.differs) == ([], "")
    more = begun(load(rows(tmp_path / "a.jsonl", ["p"] * 9), held_out=2), one.state)
    assert more.lines == ["data: new rows: 3; they come at the end of this epoch"]


def test_another_seed_is_another_order(first: Drawing, resumed: Any) -> None:
    other = resumed(OLD, seed=3)
    assert other.differs == "run.seed is 3 (was 0)"
    assert other.held_out == first.held_out


def test_one_step_off_added_rows_wait_for_the_next_epoch(first: Drawing, tmp_path: Path) -> None:
    state = first.state
    first.draw(14)  # the batch in flight goes 4 into the next epoch
    state["source"]["sampled"] = first.state["source"]["prompts"]
    more = begun(load(rows(tmp_path / "now.jsonl", OLD + NEW), held_out=4), state)
    more.stream.restore(state["source"]["sampled"])
    assert more.draw(12) == first.draw(12)
    assert sorted(more.draw(8)) == NEW


# ---- several sources -------------------------------------------------------------------------------------------------


def mixed(directory: Path, *, held_out: int = 2, weights: Sequence[float] = (3, 1), **texts: Sequence[str]) -> Any:
    sources = tuple(
        DataSource(source=str(rows(directory / f"{name}.jsonl", each)), weight=weight)
        for (name, each), weight in zip(texts.items(), weights, strict=False)
    )
    return load_prompts(DataConfig(sources=sources, held_out=held_out), seed=0)


A, B = [f"a{n}" for n in range(12)], [f"b{n}" for n in range(7)]


def test_a_source_of_a_mix_may_grow(tmp_path: Path) -> None:
    one = begun(mixed(tmp_path, a=A, b=B))
    one.draw(16)  # of b 4 of 5
    (tmp_path / "now").mkdir()
    more = begun(mixed(tmp_path / "now", a=A, b=[*NEW, *B]), one.state)
    assert "data of source 'b': new rows: 8; they come at the end of this epoch" in more.lines
    assert more.held_out == one.held_out
    following, expected = more.draw(80), one.draw(80)
    assert [text for text in following if text in A] == [text for text in expected if text in A]
    of_b = [text for text in following if text not in A]
    assert of_b[0] == next(text for text in expected if text in B) and sorted(of_b[1:9]) == NEW
    for stop in range(4, 81, 4):  # the mix stays exact
        assert sum(text in A for text in following[:stop]) == 0.75 * stop


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"b": B, "a": A}, "the sources are b (weight 3), a (weight 1) (were a (weight 3), b (weight 1))"),
        ({"a": A}, "the sources are a (weight 3) (were a (weight 3), b (weight 1)); 0 of 12 rows are new, 7 of 19"),
        ({"a": A, "b": B, "weights": (1, 1)}, "the sources are a (weight 1), b (weight 1) (were"),
    ],
)
def test_another_mix_is_told(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    one = begun(mixed(tmp_path, a=A, b=B))
    one.draw(14)
    (tmp_path / "now").mkdir()
    other = begun(mixed(tmp_path / "now", **changed), one.state)
    assert other.differs.startswith(said)
    assert not {*other.draw(60)} & {*one.held_out}


def test_a_source_of_another_name_goes_on_by_its_rows(tmp_path: Path) -> None:
    one = begun(mixed(tmp_path, a=A, b=B))
    one.draw(14)
    (tmp_path / "now").mkdir()
    other = begun(mixed(tmp_path / "now", a=A, c=B[::-1]), one.state)
    assert not other.differs and other.held_out == one.held_out
    assert other.draw(60) == one.draw(60)
