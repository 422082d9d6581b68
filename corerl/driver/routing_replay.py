"""Keep or drop the experts recorded by the engine, depending on whether training replays them."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from corerl.errors import DataError
from corerl.types import Output, SampleBatch

COLUMN = Output.ROUTED_EXPERTS.value


def replayed(samples: SampleBatch, *, replays: bool, source: str) -> SampleBatch:
    """The samples with the engine's column `routed_experts` if training `replays` it, otherwise without it.

    Raises DataError if the column is needed but missing or malformed; `source` is where the samples came from, in
    words.
    """
    if not replays:
        columns = {name: column for name, column in samples.columns.items() if name != COLUMN}
        return evolve(samples, columns=columns)
    column = samples.columns.get(COLUMN)
    if column is None:
        raise DataError(
            f"algorithm.routing_replay: 'engine', and {source} came without {COLUMN!r}; set it to 'recompute' (with "
            "old_logprobs='recompute') or 'none', or use an engine that reports the experts of each token"
        )
    if column.ndim != 3 or not np.issubdtype(column.dtype, np.integer):
        raise DataError(
            f"algorithm.routing_replay: {COLUMN!r} of {source} is {column.dtype} {list(column.shape)}, wanted "
            f"integers [{len(samples.tokens)}, expert layers, experts per token]"
        )
    return samples
