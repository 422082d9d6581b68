"""Dr. GRPO, as settings of GRPO."""

from __future__ import annotations

from attrs import frozen

from corerl.algorithms import AlgorithmSpec, GRPOOptions
from corerl.config import option


@frozen(kw_only=True)
class Options(GRPOOptions):
    """Dr. GRPO: GRPO without its two biases. Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical
    Perspective".

        A_t  = r - mean(r of the group)
        loss = sum of PPO's clipped term over all tokens / (samples * rollout.max_tokens)

    Division by a group's standard deviation gives prompts that are nearly solved, or nearly never, more weight than
    others. Division by a sample's own length makes a wrong answer cost less the longer it is. The paper does neither
    (section 3.1).
    """

    normalize_std: bool = option("divide a group's centered rewards by their standard deviation", default=False)


SPEC = AlgorithmSpec(
    implementation="corerl.algorithms:GRPO",
    config=Options,
    api=(2, 0),
    summary="GRPO without division by a group's spread or a sample's length (Liu et al. 2025)",
    by_prompt=True,
    defaults={"aggregation": "constant-length"},
)
