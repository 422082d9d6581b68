"""Samples whose tokens tell where they belong, and what ranks return of them."""

from __future__ import annotations

import numpy as np

from corerl.types import ForwardResult, Output, SampleBatch
from tests.marked import marked

LOGPROBS = (Output.LOGPROBS,)


def batch_of(*lengths: int) -> SampleBatch:
    """Tokens 0, 1, 2, ... all of which the policy chose."""
    return marked(*("x" * length for length in lengths), of_rows={"group": range(len(lengths))})


def result_of(batch: SampleBatch, *samples: int) -> ForwardResult:
    """Each token's own number, as a rank gives it back for these samples in this order."""
    lengths = batch.lengths[list(samples)]
    parts = [batch.tokens[batch.offsets[sample] : batch.offsets[sample + 1]] for sample in samples]
    return ForwardResult(
        rows=np.array(samples, dtype=np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        outputs={Output.LOGPROBS: np.concatenate([np.zeros(0), *parts]).astype(np.float32)},
    )
