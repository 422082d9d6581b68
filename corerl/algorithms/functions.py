"""Call the user's functions `algorithm.advantages` and `algorithm.postprocess`, and check what they return."""

from __future__ import annotations

from typing import Any

import numpy as np

from corerl.algorithms.advantages import broadcast
from corerl.algorithms.base import Advantages, Estimate, Postprocess
from corerl.config.functions import imported
from corerl.errors import DataError
from corerl.messages import one_line
from corerl.types import FloatArray, SampleBatch


def users_estimate(name: str) -> Estimate:
    """The function `algorithm.advantages` = 'module:function'. It is called like `Algorithm.advantages`, and returns
    advantages of samples [B] or of tokens [N]. Raises ConfigError if it cannot be imported; calling it raises DataError
    if it returns anything else or raises."""
    function = imported(name, setting="algorithm.advantages")

    def estimate(samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        try:
            found: Any = np.asarray(function(samples, rewards, token_rewards), dtype=np.float32)
        except Exception as error:
            raise DataError(f"algorithm.advantages: {name!r} raised {one_line(error)}") from error
        sizes = [(len(samples),), (len(samples.tokens),)]
        mask = samples.columns["loss_mask"]
        if found.shape not in sizes:
            raise DataError(
                f"algorithm.advantages: {name!r} returned an array of shape {list(found.shape)}, wanted "
                f"[{len(samples)}], a number of each sample, or [{len(samples.tokens)}], of each token"
            )
        per_token = broadcast(found, samples) if found.shape == sizes[0] else np.where(mask, found, np.float32(0.0))
        if not np.isfinite(per_token).all():
            raise DataError(f"algorithm.advantages: {name!r} returned advantages that are not finite")
        return Advantages(advantages=per_token)

    return estimate


def users_postprocess(name: str) -> Postprocess:
    """The function `algorithm.postprocess` = 'module:function', which maps samples with all columns to those to train
    on. Raises ConfigError if it cannot be imported; calling it raises DataError if it raises or returns anything else
    than samples of which some have a loss token, with finite advantages there."""
    function, setting = imported(name, setting="algorithm.postprocess"), f"algorithm.postprocess: {name!r}"

    def postprocess(samples: SampleBatch) -> SampleBatch:
        try:
            found: Any = function(samples)
        except Exception as error:
            raise DataError(f"{setting} raised {one_line(error)}") from error
        if not isinstance(found, SampleBatch):
            what = "None" if found is None else f"a {type(found).__name__}"
            raise DataError(f"{setting} returned {what}, wanted a corerl.types.SampleBatch; return the samples")
        if missing := sorted(set(samples.columns) - set(found.columns)):
            raise DataError(f"{setting} returned samples without the column {missing[0]!r}; keep it")
        mask = found.columns["loss_mask"]
        if not mask.any():
            raise DataError(f"{setting} returned samples without a loss token; keep some")
        if not np.isfinite(found.columns["advantages"][mask]).all():
            raise DataError(f"{setting} returned advantages that are not finite")
        return found

    return postprocess
