"""A scored rollout batch by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from attrs import evolve

from corerl.data.prompts import Prompt
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from tests.marked import marked
from tests.pictured import PICTURES


def scored(step: int = 0) -> ScoredRollout:
    """Two prompts of a token each with two samples of 1, 2, 3 and 1 tokens."""
    rows = {"group": [0, 0, 1, 1], "sample": [0, 1, 0, 1], "truncated": [False] * 4}
    batch = marked(".x", ".xx", ".xxx", ".x", of_rows=rows)
    batch = evolve(batch, tokens=batch.tokens + step, temperature=0.7).with_columns(
        rollout_logprobs=np.where(batch.columns["loss_mask"], np.float32(-0.5), np.float32(0.0))
    )
    prompts = (Prompt(index=7, text="a>", answer="x", fields={"id": 3}), Prompt(index=2, text="b>", answer=""))
    return ScoredRollout(
        step=step,
        rollout=Rollout(batch=batch, prompts=prompts, texts=["x", "yy", "zzz", "x"]),
        rewards=np.array([1.0, 0.5, 0.0, 0.25], np.float32),
        exact_match=0.5,
        seconds={"rollout": 1.0},
    )


def with_pictures(step: ScoredRollout) -> ScoredRollout:
    """The first prompt shows two pictures, of which rows show the first; the other prompt shows none."""
    first, second = list(PICTURES.values())[:2]
    batch = step.rollout.batch
    column = np.zeros(len(batch.tokens), np.int32)
    column[batch.offsets[:2]] = 1
    prompts = (
        evolve(step.rollout.prompts[0], pictures=(first, second), fields={"image": b"abc", "where": Path("a/b")}),
        step.rollout.prompts[1],
    )
    batch = evolve(batch.with_columns(picture=column), pictures=(first,))
    return evolve(step, rollout=evolve(step.rollout, batch=batch, prompts=prompts))
