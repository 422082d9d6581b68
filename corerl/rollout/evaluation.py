"""Score the policy on held-out prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from corerl.config.schema import RewardConfig
from corerl.data.prompts import PromptSource
from corerl.engines.base import SamplingParams
from corerl.pictures import FoundPicture, Picture
from corerl.plugin.events import SampleShown
from corerl.rollout.rewards import Reward, described
from corerl.rollout.sampler import Rollout, Sampler
from corerl.rollout.scored import exact_fraction, first_samples, shown, truncated_fraction
from corerl.rollout.scoring import AsyncScorer, Scores
from corerl.types import ROLE, Array, BoolArray, IntArray

STEP = -1  # in place of the rollout step, for noise: no step of training has it
ROUNDING = 1e-6  # by which the reward of a right answer may miss `correct_from`, relative to that


@frozen(kw_only=True)
class EvalSet:
    """Held-out prompts, and how they are sampled and scored."""

    name: str = ""  # in metrics; that of data.held_out has none
    every: int = 1  # rollout steps between evaluations; 0: none while the run trains
    source: PromptSource  # whose held-out prompts these are
    params: SamplingParams
    samples: int = 1  # of each prompt
    correct_on: str = ""  # the part of the reward that says whether an answer is right; "": the reward
    correct_from: float | None = None  # the lowest value of a right answer; None: 1
    # (prompt, response) -> what a majority votes on; None: the response itself
    extract_answer: Callable[..., Any] | None = None
    reward: Reward | None = None  # None: the run's
    rewarding: RewardConfig = field(factory=RewardConfig)

    @property
    def counts(self) -> bool:
        """Whether right answers are counted."""
        return self.samples > 1 or bool(self.correct_on) or self.correct_from is not None


@frozen(kw_only=True)
class Evaluation:
    metrics: dict[str, float]  # eval/reward, eval/exact_match (if prompts have answers), eval/response_length, ...
    shown: tuple[SampleShown, ...]  # samples of the first prompts, the same ones every time
    pictures: tuple[Picture | FoundPicture, ...] = ()  # of these prompts
    samples: tuple[SampleShown, ...] = ()  # of all prompts
    failures: Mapping[str, int] = field(factory=dict)  # failed samples by kind of failure
    first_failure: str = ""  # as one line


async def evaluate(sampler: Sampler, eval_set: EvalSet, reward: AsyncScorer) -> Evaluation:
    """Sample and score each prompt. The same weights give the same scores at any step: noise depends on the seed, the
    prompt and the sample's number, and is that of no training step.

    If sources are mixed, each one also gets its `eval/NAME/reward`; all metrics of a set with a name are `eval/NAME/`.
    """
    prompts, params = eval_set.source.held_out_prompts(), evolve(eval_set.params, routed_experts=False)
    rollout = await sampler.sample(prompts, rollout_step=STEP, samples=eval_set.samples, params=params)
    scores = await reward.score(rollout)
    rows, _ = rollout.batch.episodes
    rewards, group = scores.rewards[rows], rollout.batch.row_columns["group"][rows]
    prefix = f"eval/{eval_set.name}/" if eval_set.name else "eval/"
    metrics = {
        f"{prefix}reward": float(rewards.mean(dtype=np.float64)),
        f"{prefix}response_length": float(rollout.batch.row_columns["response_length"].mean()),
        f"{prefix}truncated": truncated_fraction(rollout),
    }
    matched = exact_fraction(rollout)
    if matched is not None:
        metrics[f"{prefix}exact_match"] = matched
    if scores.failures:
        metrics[f"{prefix}failed"] = float(sum(scores.failures.values()))
    metrics |= {f"{prefix}reward/{name}": value / count for name, (value, count) in scores.parts.items()}
    sources, unread = np.array([prompt.source for prompt in prompts]), ""
    mixed = {} if eval_set.name else {f"{prefix}{name}/": sources == name for name in dict.fromkeys(sources) if name}
    for part, chosen in mixed.items():
        metrics[f"{part}reward"] = float(rewards[chosen[group]].mean(dtype=np.float64))
    if eval_set.counts:
        right_PG, votes_PG, unread = _right_and_votes(rollout, scores, eval_set, len(prompts))
        for part, chosen in {prefix: np.ones(len(prompts), np.bool_), **mixed}.items():
            found = pass_and_majority(right_PG[chosen], votes_PG[chosen])
            metrics |= {part + name: value for name, value in found.items()}
    first = first_samples(rollout)
    asked = [rollout.prompts[each] for each in rollout.batch.row_columns["group"][first]]
    return Evaluation(
        metrics=metrics,
        shown=shown(rollout, scores.rewards, first, values=scores.values),
        pictures=tuple(each for prompt in asked for each in prompt.pictures),
        samples=shown(rollout, scores.rewards, values=scores.values),
        failures=scores.failures,
        first_failure=scores.first or unread,
    )


def _right_and_votes(rollout: Rollout, scores: Scores, eval_set: EvalSet, P: int) -> tuple[BoolArray, Array, str]:
    """[P, G] which responses are right; [P, G] what each votes for, None if for nothing; and the first failure of
    `extract_answer`, or ""."""
    rows = rollout.batch.episodes[0]
    roles, named = rollout.batch.row_columns.get(ROLE), eval_set.correct_on.partition("/")[0]
    if roles is not None and named in roles:  # else the last role's
        rows = rows[roles[rows] == named]
    at = rollout.batch.row_columns["group"][rows], rollout.batch.row_columns["sample"][rows]
    right_PG, votes_PG = np.zeros((P, eval_set.samples), np.bool_), np.full((P, eval_set.samples), None, object)
    wanted = 1.0 if eval_set.correct_from is None else eval_set.correct_from
    value = scores.part(eval_set.correct_on, setting="eval.correct_on")[rows].astype(np.float64)
    right_PG[at] = (value >= wanted - ROUNDING * abs(wanted)) & ~scores.failed[rows]
    unread = ""
    for group, sample, row in zip(*at, rows, strict=True):
        prompt, text = rollout.prompts[group], rollout.texts[row]
        try:
            found = text if eval_set.extract_answer is None else eval_set.extract_answer(prompt, text)
            votes_PG[group, sample] = None if found is None else str(found).strip()
        except Exception as error:  # the user's: this answer has no vote
            unread = unread or f"eval.answer raised {described(error)} on prompt {prompt.index}"
    return right_PG, votes_PG, unread


def pass_and_majority(right_PG: BoolArray, votes_PG: Array) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and G, the number of samples; majority@k for the same k except 1 and 2, for which it
    equals pass@1."""
    G = right_PG.shape[1]
    powers = sorted({*(2**power for power in range(G.bit_length())), G})
    passed = {f"pass@{k}": pass_at(k, G, right_PG.sum(1)) for k in powers}
    return passed | {f"majority@{k}": majority_at(k, right_PG, votes_PG) for k in powers if k > 2}


def pass_at(k: int, G: int, right_P: IntArray) -> float:
    """The probability that one of k samples is right, estimated without bias from G >= k samples, c of them right, and
    averaged over prompts:

        1 - C(G - c, k) / C(G, k)        Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1
    """
    return float(np.mean([1 - math.comb(G - c, k) / math.comb(G, k) for c in right_P.tolist()]))


def majority_at(k: int, right_PG: BoolArray, votes_PG: Array) -> float:
    """How often the answer that most of k samples agree on is right (Wang et al. 2023, "Self-Consistency Improves Chain
    of Thought Reasoning in Language Models"), averaged over prompts and their G // k disjoint blocks of k samples.

    Of answers with equally many votes each is as likely to win; an answer counts as right by the share of its samples
    that are. A block without any vote is wrong.
    """
    found = []
    for right_G, votes_G in zip(right_PG, votes_PG, strict=True):
        for begin in range(0, len(right_G) - k + 1, k):
            right, votes = right_G[begin : begin + k], votes_G[begin : begin + k]
            counts = Counter(vote for vote in votes if vote is not None)
            most = max(counts.values(), default=0)
            found.append(right[[counts[vote] == most for vote in votes]].mean() if counts else 0.0)
    return float(np.mean(found))
