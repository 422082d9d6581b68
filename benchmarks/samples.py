"""Batches of made-up samples with the columns of a GRPO step."""

from __future__ import annotations

import numpy as np

from corerl.data.packing import StepPlan, plan_steps
from corerl.types import IntArray, ParallelLayout, SampleBatch, offsets_of

GROUP = 8  # samples of one prompt


def make_batch(lengths: IntArray, *, prompt: int, vocab: int, group: int = 0, seed: int = 0) -> SampleBatch:
    """Samples of `lengths` tokens, the first `prompt` of each its prompt; nothing temporary is as large as a column.
    With a `group`, so many samples have the same prompt; otherwise no two have."""
    rng = np.random.default_rng(seed)
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    mask = np.ones(total, dtype=np.bool_)
    mask[(offsets[:-1, None] + np.arange(prompt)).ravel()] = False
    logprobs = rng.standard_normal(total, dtype=np.float32)
    logprobs *= 0.3
    logprobs -= np.float32(np.log(vocab))
    logprobs *= mask
    advantages = np.repeat(rng.standard_normal(len(lengths), dtype=np.float32), lengths)
    advantages *= mask
    tokens = rng.integers(3, vocab, total)
    for sample in range(len(lengths)) if group else ():
        first = offsets[sample // group * group]
        tokens[offsets[sample] : offsets[sample] + prompt] = tokens[first : first + prompt]
    return SampleBatch(
        tokens=tokens,
        offsets=offsets,
        columns={
            "loss_mask": mask,
            "rollout_logprobs": logprobs,
            "old_logprobs": logprobs.copy(),
            "advantages": advantages,
            "versions": np.full(total, 1, dtype=np.int64),
        },
        row_columns={"group": np.arange(len(lengths)) // (group or GROUP)},
    )


def plan_one_step(
    batch: SampleBatch, *, dp_size: int, tokens_per_micro_batch: int, shares_prefixes: bool = False
) -> StepPlan:
    """All samples as one optimizer step."""
    (plan,) = plan_steps(
        batch,
        ParallelLayout.data_parallel(rank=0, world_size=dp_size, shares_prefixes=shares_prefixes),
        tokens_per_micro_batch=tokens_per_micro_batch,
        aggregation="token-mean",
        max_tokens=1,
        seed=0,
    )
    return plan
