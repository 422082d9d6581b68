from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.errors import DataError
from corerl.rollout.scored import ScoredRollout, postprocessed
from tests.rollout.scored import scored, with_pictures


def through(function: Callable[[ScoredRollout], Any]) -> ScoredRollout:
    return postprocessed(scored(), function, name="mine:shape")


def other_rewards_of_a_row(batch: ScoredRollout) -> ScoredRollout:
    """Where samples 0 and 1, and 2 and 3, are of one episode each."""
    samples = batch.rollout.batch
    rows = {**samples.row_columns, "episode": np.array([0, 0, 1, 1]), "final": np.array([False, True] * 2)}
    return evolve(batch, rollout=evolve(batch.rollout, batch=evolve(samples, row_columns=rows)))


def numbers_for_mask(batch: ScoredRollout) -> ScoredRollout:
    """As np.where(condition, 0, mask) makes of a mask."""
    samples = batch.rollout.batch
    mask = np.where(samples.columns["loss_mask"], 1, 0)
    return evolve(batch, rollout=evolve(batch.rollout, batch=samples.with_columns(loss_mask=mask)))


def without_row_columns(batch: ScoredRollout) -> ScoredRollout:
    return evolve(batch, rollout=evolve(batch.rollout, batch=evolve(batch.rollout.batch, row_columns={})))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: 1 / 0, r"raised ZeroDivisionError: division by zero at step 0$"),
        (lambda batch: None, r"returned nothing, wanted a corerl.rollout.ScoredRollout; return the batch"),
        (lambda batch: batch.rewards, r"returned ndarray, wanted a corerl.rollout.ScoredRollout; return the batch"),
        (lambda batch: evolve(batch, rewards=batch.rewards[:3]), r"of 4 samples with 3 rewards and 4 texts"),
        (other_rewards_of_a_row, r"in which rows of an episode have different rewards; give each its episode's \("),
        (lambda batch: evolve(batch, rewards=batch.rewards * np.nan), r"whose rewards are not all finite numbers$"),
        (lambda batch: evolve(batch, rewards=np.array(["1"] * 4)), r"whose rewards are not all finite numbers$"),
        (without_row_columns, r"without the column 'group'; keep it, as `attrs.evolve` does$"),
        (numbers_for_mask, r"raised ValueError: column 'loss_mask' is int64, expected bool; write mask.astype\(bool\)"),
    ],
)
def test_an_unusable_batch_names_the_function(function: Callable[[ScoredRollout], Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^rollout.postprocess='mine:shape' (returned a batch )?{message}"):
        through(function)


def test_samples_show_pictures_in_their_places() -> None:
    given = with_pictures(scored(0))
    first, second = (repr(each) for each in given.rollout.prompts[0].pictures)
    assert re.fullmatch("<picture [0-9a-f]{4} 3x2>", first)
    assert [each.prompt for each in given.shown()] == [f"{first}{second}a>", "b>"]
    names = tuple(each.id[:16] for each in given.rollout.prompts[0].pictures)
    assert [each.pictures for each in given.samples()] == [names, names, (), ()]
    image = {"type": "image"}
    parts = [image, {"type": "text", "text": "or"}, image]
    chat = evolve(given.rollout.prompts[0], messages=({"role": "user", "content": parts},))
    rollout = evolve(given.rollout, prompts=(chat, given.rollout.prompts[1]))
    assert evolve(given, rollout=rollout).samples()[0].prompt == f"{first}or{second}"


def test_parts_of_rows_that_are_gone_are_left_out() -> None:
    def second_prompt(batch: ScoredRollout) -> ScoredRollout:
        return evolve(batch, rollout=batch.rollout.take_prompts(np.array([1])), rewards=batch.rewards[2:])

    step = evolve(scored(), values={"right": np.arange(4, dtype=np.float32)})
    assert [each.parts for each in postprocessed(step, second_prompt, name="mine:second").samples()] == [{}, {}]


def test_a_batch_may_be_left_without_loss_tokens() -> None:
    def masked(batch: ScoredRollout) -> ScoredRollout:
        samples = batch.rollout.batch
        nothing = np.zeros_like(samples.columns["loss_mask"])
        return evolve(batch, rollout=evolve(batch.rollout, batch=samples.with_columns(loss_mask=nothing)))

    assert not through(masked).rollout.batch.columns["loss_mask"].any()  # the step is skipped: driver/test_run.py
