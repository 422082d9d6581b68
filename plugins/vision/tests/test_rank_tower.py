"""A tower encodes each picture once a pass; a trained one steps only where a batch shows pictures, and checkpoints know
how often it has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from attrs import evolve

from corerl.backend import StateKey
from corerl_testing import Runs, Setup, forward, running, start, step_at, train
from corerl_testing.scenarios import pictures
from corerl_vision.rank_tower import VisionRankTower

SETUP = Setup(backend="fsdp", model="", fields=pictures.FIELDS, pictures="vision", tower="trained")
TEXT = ((),) * len(pictures.SHOWN)


def learned(shows: Sequence[bool], save_to: str = "", resumed: bool = False) -> dict[str, list[float]]:
    """The tower after steps with and without pictures; with `save_to`, it is saved before the last one."""
    worker, _ = start(SETUP)
    for number, shown in enumerate(shows):
        if save_to and number == len(shows) - 1:
            worker.save(f"{save_to}/actor", step_at(number), False)
            if resumed:
                worker.shutdown("resumed")
                worker, _ = start(SETUP, resume=f"{save_to}/actor")
        rows = pictures.SHOWN if shown else TEXT
        train(worker, SETUP, number, samples=pictures.samples_with_pictures(number, shown=rows))
    assert worker.backend.tower is not None
    found = {chunk.name: chunk.view.flatten().tolist() for chunk in worker.backend.tower.chunks(StateKey.MASTER)}
    worker.shutdown("done")
    return found


@pytest.mark.parametrize(
    ("shows", "resumed"),
    [([False, False, True], False), ([False, False, True], True), ([True, False, False, True], True)],
)
def test_a_save_between_pictures_changes_no_later_step(
    shows: Sequence[bool], resumed: bool, runs: Runs, tmp_path: Path
) -> None:
    (wanted,) = runs.rank_sets[1].run(learned, shows)
    (found,) = runs.rank_sets[1].run(learned, shows, str(tmp_path), resumed)
    assert found == wanted
    assert [wanted] != runs.rank_sets[1].run(learned, [])


def encoded(tower: Literal["frozen", "trained"]) -> list[int]:
    """How many pictures a tower has encoded after a forward pass, and after a step besides."""
    setup, samples = evolve(SETUP, tower=tower), pictures.samples_with_pictures(0)
    with running(setup) as worker:
        forward(worker, setup, samples)
        assert isinstance(worker.backend.tower, VisionRankTower)
        counted = worker.backend.tower._tower
        after_forward = counted.encoded
        train(worker, setup, 0, samples=samples)
        return [after_forward, counted.encoded]


@pytest.mark.parametrize(("tower", "counts"), [("frozen", [2, 4]), ("trained", [2, 6])])
def test_a_rank_encodes_each_picture_once_a_pass(
    runs: Runs, tower: Literal["frozen", "trained"], counts: list[int]
) -> None:
    """Two pictures, which several rows show; a step that trains the tower has a pass more."""
    assert runs.rank_sets[1].run(encoded, tower) == [counts]
