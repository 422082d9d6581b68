"""Score the policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from attrs import evolve, field, frozen

from corerl.data.prompts import Prompt
from corerl.engines.base import SamplingParams
from corerl.plugin.events import SampleShown
from corerl.rollout.rewards.base import Scoring
from corerl.rollout.sampler import Sampler
from corerl.rollout.sources.base import exact_share, first_samples, shown


@frozen(kw_only=True)
class Evaluation:
    metrics: dict[str, float]  # eval/reward, eval/exact_match (if prompts have answers), eval/response_length
    shown: tuple[SampleShown, ...]  # samples of the first prompts, the same ones every time
    samples: tuple[SampleShown, ...] = ()  # of all prompts
    failures: Mapping[str, int] = field(factory=dict)  # failed samples by kind of failure
    first_failure: str = ""  # as one line


async def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    reward: Scoring,
    *,
    params: SamplingParams,
    show: int = 3,
) -> Evaluation:
    """Score one greedy response to each prompt. The same weights give the same scores at any step.

    If sources are mixed, each one also gets its `eval/NAME/reward`.
    """
    rollout = await sampler.sample(
        prompts, rollout_step=0, samples=1, params=evolve(params, greedy=True, routed_experts=False)
    )
    scores = await reward.score(rollout)
    samples, _ = rollout.batch.episodes  # one for each prompt
    rewards = scores.rewards[samples]
    metrics = {
        "eval/reward": float(rewards.mean(dtype=np.float64)),
        "eval/response_length": float(rollout.batch.rows["response_length"].mean()),
    }
    matched = exact_share(rollout)
    if matched is not None:
        metrics["eval/exact_match"] = matched
    if scores.failures:
        metrics["eval/failed"] = float(sum(scores.failures.values()))
    metrics |= {f"eval/reward/{name}": value / count for name, (value, count) in scores.parts.items()}
    sources = np.array([prompt.source for prompt in prompts])
    for name in dict.fromkeys(prompt.source for prompt in prompts if prompt.source):
        metrics[f"eval/{name}/reward"] = float(rewards[sources == name].mean(dtype=np.float64))
    return Evaluation(
        metrics=metrics,
        shown=shown(rollout, scores.rewards, first_samples(rollout, show)),
        samples=shown(rollout, scores.rewards),
        failures=scores.failures,
        first_failure=scores.first,
    )
