from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.errors import CheckpointError, DataError
from corerl.rollout.recorded import SavedRollouts, read_rollout, write_rollout
from corerl.rollout.scored import ScoredRollout
from tests.pictured import PICTURES, rows_in
from tests.rollout.scored import scored, with_pictures


def rest(source: SavedRollouts) -> list[ScoredRollout]:
    """The steps that it still has."""
    return list(iter(lambda: asyncio.run(source.next()), None))


def write(directory: Path, *steps: int) -> None:
    for step in steps:
        write_rollout(directory, scored(step))


def test_a_batch_is_read_as_it_was_written(tmp_path: Path) -> None:
    values = {"right": np.array([1, 0, 0.5, 0], np.float32), "a/short": np.array([0.25, 0, 0, np.nan], np.float32)}
    given = evolve(scored(3), parts={"right": (1.5, 4), "a/short": (0.25, 3)}, values=values)
    path = write_rollout(tmp_path / "rollouts", given)
    assert path.name == "step-00000003.npz" and [each.name for each in path.parent.iterdir()] == [path.name]
    found = read_rollout(path)
    batch, wanted = found.rollout.batch, given.rollout.batch
    for arrays, expected in (
        (batch.columns, wanted.columns),
        (batch.row_columns, wanted.row_columns),
        ({"t": batch.tokens, "o": batch.offsets}, {"t": wanted.tokens, "o": wanted.offsets}),
        ({"r": found.rewards}, {"r": given.rewards}),
        (found.values, values),
    ):
        assert arrays.keys() == expected.keys()
        for name in expected:
            np.testing.assert_array_equal(arrays[name], expected[name])
            assert arrays[name].dtype == expected[name].dtype
    assert (found.step, found.exact_match, batch.temperature, found.parts) == (3, 0.5, 0.7, given.parts)
    assert (found.rollout.prompts, found.rollout.texts) == (given.rollout.prompts, given.rollout.texts)


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").touch()
    with pytest.raises(DataError) as caught:
        write_rollout(tmp_path / "rollouts", scored(3))
    message = caught.value.message
    assert message.startswith(f"cannot write the rollout batch {tmp_path}/rollouts/step-00000003.npz: ")
    assert message.endswith("; earlier batches are intact") and "\n" not in message


def test_files_come_in_step_order_numbered_from_0(tmp_path: Path) -> None:
    write(tmp_path / "rollouts", 30, 4, 100)
    (tmp_path / "rollouts/step-00000001.partial").touch()
    steps = rest(SavedRollouts(tmp_path, steps=3, vocab_size=200))  # a run's directory, or that in it
    assert [each.step for each in steps] == [0, 1, 2]
    assert [int(each.rollout.batch.tokens[0]) for each in steps] == [4, 30, 100]
    assert len(rest(SavedRollouts(tmp_path / "rollouts", steps=2, vocab_size=200))) == 2


def test_a_resumed_run_continues_with_the_next_file(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    source = SavedRollouts(tmp_path, steps=3, vocab_size=200)
    asyncio.run(source.next())
    resumed = SavedRollouts(tmp_path, steps=3, vocab_size=200)
    resumed.restore(source.position)
    assert [each.step for each in rest(resumed)] == [1, 2]
    write(tmp_path, 3)
    with pytest.raises(CheckpointError, match="was trained from 3 saved rollout batches, but there are now 4"):
        SavedRollouts(tmp_path, steps=3, vocab_size=200).restore(source.position)


def test_missing_or_foreign_batches_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^rollout.saved: no rollout batches .* in '.*/none'; set it to the `rollouts`"
    ):
        SavedRollouts(tmp_path / "none", steps=1, vocab_size=200)
    write(tmp_path, 0)
    with pytest.raises(
        DataError,
        match=r"^run.steps: got 2, but the number of rollout batches in '.*' is 1; set run.steps to at most 1",
    ):
        SavedRollouts(tmp_path, steps=2, vocab_size=200)
    with pytest.raises(DataError, match=r"contains token 10, but the model's vocabulary has only 10 tokens"):
        asyncio.run(SavedRollouts(tmp_path, steps=1, vocab_size=10).next())


def test_pictures_are_not_trained_on_as_text(tmp_path: Path) -> None:
    write_rollout(tmp_path, with_pictures(scored(0)))
    with pytest.raises(DataError, match=r"step-00000000.npz has rows that show pictures, but model.pictures is not"):
        rest(SavedRollouts(tmp_path, steps=1, vocab_size=200))
    (step,) = rest(SavedRollouts(tmp_path, steps=1, vocab_size=200, pictures=True))
    assert len(step.rollout.batch.pictures) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = write_rollout(tmp_path, scored())
    content: Any = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "other": b"no zip at all"}[damage])
    with pytest.raises(DataError, match=r"cannot read the rollout batch .*step-00000000.npz"):
        read_rollout(path)


def test_a_batch_on_disk_keeps_its_pictures(tmp_path: Path) -> None:
    given = with_pictures(scored(3))
    found = read_rollout(write_rollout(tmp_path, given)).rollout
    assert found.batch.columns["picture"].dtype == np.int32
    assert rows_in(found.batch) == rows_in(given.rollout.batch)
    for picture in found.batch.pictures:
        np.testing.assert_array_equal(picture.pixels, PICTURES[picture.id].pixels)
    ids = [[each.id for each in prompt.pictures] for prompt in found.prompts]
    assert ids == [[each.id for each in prompt.pictures] for prompt in given.rollout.prompts]
    assert found.prompts[0].fields == {"image": "3 bytes", "where": "a/b"}  # what JSON cannot hold becomes text
    dropped = evolve(given, rollout=given.rollout.take_rows(np.array([2, 3])))  # as a postprocess may
    again = read_rollout(write_rollout(tmp_path, dropped)).rollout
    assert again.prompts[0].pictures[0].size == (3, 2)
