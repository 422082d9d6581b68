"""Split a rollout batch into optimizer steps, dp ranks and micro-batches: indices only, no token is copied here."""

from __future__ import annotations

from attrs import frozen

from corerl.types import FloatArray, IntArray


@frozen(kw_only=True, eq=False)
class StepPlan:
    """One pass of chosen samples through the model, as data that goes to every rank beside the batch's reference."""

    micro_batches: tuple[tuple[IntArray, ...], ...]  # [dp_size][M] sample indices; M is equal for all dp ranks
    filler: tuple[tuple[bool, ...], ...]  # [dp_size][M] True: real tokens at weight zero, so that ranks stay in step
    scales: FloatArray  # [B] token weight = scales[sample] * loss_mask; holds 1 / denominator; 0 outside this step
