"""A scored rollout batch by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from attrs import evolve

from corerl.data.prompts import Prompt
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.types import SampleBatch
from tests.pictured import PICTURES


def scored(step: int = 0) -> ScoredRollout:
    """Two prompts of a token each with two samples of 1, 2, 3 and 1 tokens."""
    offsets = np.array([0, 2, 5, 9, 11])
    mask = ~np.isin(np.arange(11), offsets[:-1])
    batch = SampleBatch(
        tokens=np.arange(11) + step,
        offsets=offsets,
        columns={"loss_mask": mask, "rollout_logprobs": np.where(mask, -0.5, 0.0).astype(np.float32)},
        row_columns={
            "group": np.array([0, 0, 1, 1]),
            "sample": np.array([0, 1, 0, 1]),
            "truncated": np.zeros(4, np.bool_),
        },
        temperature=0.7,
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
