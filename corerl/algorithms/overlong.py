"""Penalize or mask samples that come near the maximum response length, or are cut off there."""

from __future__ import annotations

import numpy as np

from corerl.types import FloatArray, IntArray, SampleBatch

# Columns that SampleBatch promises to be 0 at tokens that the policy did not choose or should not learn.
CHOSEN = (
    "loss_mask",
    "rollout_logprobs",
    "versions",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "returns",
)


def soft_overlong_penalty(lengths: IntArray, *, max_tokens: int, buffer: int) -> FloatArray:
    """[B] what to add to the reward of a response of each length: it falls from 0 to -1 in the last `buffer` tokens.

        0                                          length <= max_tokens - buffer
        (max_tokens - buffer - length) / buffer    up to max_tokens
        -1                                         beyond

    Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", eq. 13.

        lengths: [B] sampled tokens of each response, without its prompt and without the results of tools
        buffer: tokens, in 0..max_tokens; 0 leaves only the -1 beyond max_tokens
    """
    # Lengths are integers: with a buffer of 0, the first one beyond max_tokens already gets -1.
    return np.clip((max_tokens - buffer - lengths) / max(buffer, 1), -1.0, 0.0).astype(np.float32)


def without_truncated(batch: SampleBatch) -> SampleBatch:
    """The batch without loss tokens in the samples whose row `truncated` is set.

    Overlong filtering: a sound answer is not punished for being cut off (Yu et al. 2025, "DAPO", section 3.4).
    The samples stay in the batch; their columns that are 0 outside loss tokens become 0 everywhere.
    """
    cut = np.repeat(np.asarray(batch.row_columns["truncated"], dtype=np.bool_), batch.lengths)
    found = {name: batch.columns[name] for name in CHOSEN if name in batch.columns}
    return batch.with_columns(**{name: np.where(cut, column.dtype.type(0), column) for name, column in found.items()})
