"""What becomes of samples that come near the most tokens a response may have, or are cut off there."""

from __future__ import annotations

import numpy as np

from corerl.types import FloatArray, IntArray, SampleBatch

# What SampleBatch promises to be 0 where the policy did not choose the token, or where that is not to be learned.
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
    """[B] What is added to the reward of a response of each length: less and less in the last `buffer` tokens.

        0                                          length <= max_tokens - buffer
        (max_tokens - buffer - length) / buffer    up to max_tokens
        -1                                         beyond

    Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", eq. 13.

        lengths: [B] tokens of each response, without its prompt
        buffer: tokens, in 0..max_tokens; 0 leaves only the -1 beyond max_tokens
    """
    # Lengths are whole: with a buffer of 0 the first one beyond is at -1 already.
    return np.clip((max_tokens - buffer - lengths) / max(buffer, 1), -1.0, 0.0).astype(np.float32)


def without_truncated(batch: SampleBatch) -> SampleBatch:
    """The batch with no loss token in the samples whose row `truncated` is set.

    Overlong filtering: a sound answer that was cut off is not punished for it (Yu et al. 2025, "DAPO", section 3.4).
    The samples stay in the batch. The columns that are 0 outside loss tokens become 0 in them.
    """
    cut = np.repeat(np.asarray(batch.rows["truncated"], dtype=np.bool_), batch.lengths)
    found = {name: batch.columns[name] for name in CHOSEN if name in batch.columns}
    return batch.with_columns(**{name: np.where(cut, column.dtype.type(0), column) for name, column in found.items()})
