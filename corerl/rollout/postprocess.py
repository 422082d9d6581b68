"""Apply a user's function to each scored batch, between rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from corerl.errors import DataError
from corerl.rollout.scored import ScoredRollout


def postprocessed(scored: ScoredRollout, function: Callable[[ScoredRollout], Any], *, name: str) -> ScoredRollout:
    """What `function` makes of a batch: it may shape rewards, drop samples or change loss masks; `name` is the
    config's. Raises DataError if it raises, or returns a batch that cannot be trained on."""
    try:
        result = function(scored)
    except Exception as error:
        raise DataError(
            f"rollout.postprocess={name!r} raised {type(error).__name__}: {error} at step {scored.step}"
        ) from error
    if not isinstance(result, ScoredRollout):
        what = "nothing" if result is None else type(result).__name__
        raise DataError(
            f"rollout.postprocess={name!r} returned {what}, wanted a corerl.rollout.ScoredRollout; return the "
            "batch that was passed in, or a copy made with `attrs.evolve`"
        )
    if flaw := _flaw(result):
        raise DataError(f"rollout.postprocess={name!r} returned a batch {flaw}")
    return result


def _flaw(scored: ScoredRollout) -> str:
    """Why the batch cannot be trained on; "" if it can."""
    batch = scored.rollout.batch
    if not len(batch):
        return "without samples"
    if not isinstance(scored.rewards, np.ndarray) or scored.rewards.dtype.kind not in "fiu":
        kind = getattr(scored.rewards, "dtype", type(scored.rewards).__name__)
        return f"whose rewards are of type {kind}, wanted a numpy array of numbers"
    if len(scored.rewards) != len(batch) or len(scored.rollout.texts) != len(batch):
        return (
            f"of {len(batch)} samples with {len(scored.rewards)} rewards and {len(scored.rollout.texts)} texts; "
            "each sample needs one of each"
        )
    if not np.isfinite(scored.rewards).all():
        return "whose rewards are not all finite"
    episodes, episode_of = batch.episodes
    if (scored.rewards != scored.rewards[episodes][episode_of]).any():
        return "in which samples of an episode have different rewards; give each its episode's (`batch.episodes`)"
    if not batch.columns["loss_mask"].any():
        return "without any loss tokens"
    return ""
