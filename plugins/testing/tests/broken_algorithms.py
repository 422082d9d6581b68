"""Algorithms with one fault each, and the check that must find it: they prove that the suite can fail.

Each is GRPO with a few wrong lines, or a few right ones that the suite must let pass.
`corerl verify --algorithm plugins.testing.tests.broken_algorithms:WRITES_INTO_REWARDS` shows how a fault is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import torch
from attrs import evolve, frozen

from corerl.algorithms import (
    ACTOR,
    Advantages,
    AlgorithmRun,
    AlgorithmSpec,
    ForwardPass,
    LossInputs,
    LossResult,
    Objective,
    PolicyTokens,
    RoleKind,
    TensorMetric,
    broadcast,
    group_advantages,
    sample_rewards,
)
from corerl.plugin import Kind, Problem, load, load_implementation
from corerl.types import FloatArray, LossSpec, Output, Reduction, SampleBatch

LOADED = load(Kind.ALGORITHMS, "grpo")
PLAIN: AlgorithmSpec = LOADED.spec
Options = PLAIN.config
GRPO = load_implementation(Kind.ALGORITHMS, LOADED)


@frozen(kw_only=True)
class FaultySpec(AlgorithmSpec):
    """The spec of an algorithm that is wrong on purpose."""

    seen_by: str  # the check that must fail, and the only one that may; "" if nothing is wrong
    saying: str = ""  # a part of what it says


def faulty(cls: str, fault: str, *, seen_by: str, saying: str = "", **changes: Any) -> FaultySpec:
    fields = attrs.fields_dict(AlgorithmSpec)
    given = {name: getattr(PLAIN, name) for name in fields} | {"implementation": f"{__name__}:{cls}", "summary": fault}
    return FaultySpec(**(given | changes), seen_by=seen_by, saying=saying)


# ---- specs -----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Unexplained(Options):
    baseline: float = 0.0


class WithACritic(GRPO):
    """Trains no critic."""


class PassesOfNobody(GRPO):
    def forwards(self) -> Sequence[ForwardPass]:
        return [ForwardPass(role="critic", columns={"values": Output.VALUES})]


def never(config: Options, run: AlgorithmRun) -> list[Problem]:
    return [Problem("", "learns nothing")]


# ---- advantages ------------------------------------------------------------------------------------------------------


class AsksForRows(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        rewards = rewards * samples.row_columns.get("difficulty", np.float32(1.0))
        return super().advantages(samples, rewards, token_rewards)


class WritesIntoRewards(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found = super().advantages(samples, rewards, token_rewards)
        rewards -= rewards.mean()
        return found


class AtPromptsToo(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        return Advantages(advantages=np.repeat(rewards - rewards.mean(), samples.lengths).astype(np.float32))


class Draws(GRPO):
    noise: ClassVar[np.random.Generator] = np.random.default_rng(0)

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found = super().advantages(samples, rewards, token_rewards)
        scale = self.noise.uniform(0.9, 1.1, len(samples.tokens)).astype(np.float32)
        return evolve(found, advantages=found.advantages * scale)


class ReadsPrompts(GRPO):
    """Weighs a sample by its mean log-prob, over prompt tokens too, where these are 0 until something writes there."""

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found = super().advantages(samples, rewards, token_rewards)
        sums = np.bincount(samples.row_of, weights=samples.columns["rollout_logprobs"], minlength=len(samples))
        return evolve(found, advantages=found.advantages * broadcast(np.exp(sums / samples.lengths), samples))


class EarlierCountMore(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found = super().advantages(samples, rewards, token_rewards)
        place = np.linspace(1.0, 0.5, len(samples), dtype=np.float32)
        return evolve(found, advantages=found.advantages * broadcast(place, samples))


class NumbersOfPrompts(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found = super().advantages(samples, rewards, token_rewards)
        number = (samples.row_columns["group"] % 2 + 1).astype(np.float32)
        return evolve(found, advantages=found.advantages * broadcast(number, samples))


class ForgetsEqualRewards(GRPO):
    """In float32, the mean of three rewards of 0.7 is another number."""

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        compared = np.zeros(len(samples), np.float32)
        for group in np.unique(samples.row_columns["group"]):
            members = samples.row_columns["group"] == group
            centred = rewards[members] - rewards[members].mean()
            compared[members] = centred / (centred.std() + np.float32(1e-8))
        return Advantages(advantages=broadcast(compared, samples))


class ScalesByTheBatch(GRPO):
    """Divides by the spread of the whole batch, which its spec denies."""

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found = super().advantages(samples, rewards, token_rewards)
        square = float((found.advantages.astype(np.float64) ** 2).sum()) / max(
            int(samples.columns["loss_mask"].sum()), 1
        )
        return evolve(found, advantages=(found.advantages / (square + 1.0)).astype(np.float32))


class TakesAMetric(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found = super().advantages(samples, rewards, token_rewards)
        return evolve(found, metrics={"train/grad_norm": float(rewards.std())})


# ---- losses ----------------------------------------------------------------------------------------------------------


class OtherLoss(GRPO):
    name: ClassVar[str]

    def objectives(self) -> Mapping[str, Objective]:
        return {ACTOR: Objective(loss=LossSpec(name=f"{__name__}:{self.name}"))}


def as_class(loss: Callable[..., LossResult]) -> Callable[..., LossResult]:
    """GRPO with this loss is a class of this module, named like it: `Detaches` of `detaches`."""
    name = loss.__name__.title().replace("_", "")
    globals()[name] = type(name, (OtherLoss,), {"name": loss.__name__})
    return loss


@as_class
def asks_for_columns(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="asks_for_columns")
    scores = inputs.columns.get("scores", tokens.advantages)
    return tokens.result(-tokens.log_ratio.exp() * scores)


@as_class
def writes_into_columns(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="writes_into_columns")
    result = tokens.result(-tokens.log_ratio.exp() * tokens.advantages)
    inputs.columns["advantages"].clamp_(-1.0, 1.0)
    return result


@as_class
def ignores_the_mask(inputs: LossInputs) -> LossResult:
    columns = inputs.columns
    assert inputs.logprobs is not None
    ratio = (inputs.logprobs - columns["old_logprobs"]).exp()
    loss = -(columns["weights"] * ratio * columns["advantages"]).sum()
    return LossResult(loss, {"loss": TensorMetric(loss.detach(), columns["weights"].sum(), Reduction.LOSS)})


@as_class
def mean_of_micro_batch(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="mean_of_micro_batch")
    advantages = tokens.advantages - tokens.advantages.sum() / tokens.counted.sum().clamp(min=1)
    return tokens.result(-tokens.log_ratio.exp() * advantages)


@as_class
def detaches(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="detaches")
    return tokens.result(-tokens.log_ratio.exp().detach() * tokens.advantages)


@as_class
def detaches_a_part(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="detaches_a_part")
    log_ratio = torch.where(tokens.advantages > 0, tokens.log_ratio, tokens.log_ratio.detach())
    return tokens.result(-tokens.sample_mean(log_ratio).exp() * tokens.advantages)


@as_class
def holds_a_negative_factor(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="holds_a_negative_factor")
    return tokens.result(-(1.0 + tokens.log_ratio.detach()) * tokens.advantages * tokens.logprobs)


@as_class
def detaches_entropy(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="detaches_entropy")
    assert inputs.entropy is not None
    bonus = torch.where(tokens.counted, inputs.entropy.detach(), 0.0)
    return tokens.result(-tokens.log_ratio.exp() * tokens.advantages - 0.01 * bonus)


@as_class
def sum_of_means(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="sum_of_means")
    result = tokens.result(-tokens.log_ratio.exp() * tokens.advantages)
    mean = tokens.advantages.abs().sum() / tokens.counted.sum().clamp(min=1)
    return evolve(result, metrics={**result.metrics, "advantage": TensorMetric(mean, torch.ones(()))})


@as_class
def other_ratio(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="other_ratio")
    ratio = tokens.sample_mean(tokens.log_ratio).exp()
    found = tokens.result(-ratio * tokens.advantages)
    mean = TensorMetric(torch.where(tokens.counted, ratio.detach(), 0.0).sum(), tokens.counted.sum())
    return LossResult(found.loss, {**found.metrics, "ratio": mean})


@as_class
def wrong_sign(inputs: LossInputs) -> LossResult:
    tokens = PolicyTokens.of(inputs, name="wrong_sign")
    return tokens.result(tokens.log_ratio.exp() * tokens.advantages)


class FirstOfTheBest(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        found, groups = np.zeros(len(rewards), np.float32), samples.row_columns["group"]
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            if rewards[members].min() < rewards[members].max():
                found[members[np.argmax(rewards[members])]] = 1.0
        return Advantages(advantages=broadcast(found, samples))


class ComparesSamples(GRPO):
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        each = sample_rewards(samples, rewards, token_rewards)
        better = group_advantages(each, samples.row_columns["group"], normalize_std=True)
        return Advantages(advantages=broadcast(better, samples))


@as_class
def truncated_weights(inputs: LossInputs, *, kl_coef: float = 0.0, kl_estimator: str = "k3") -> LossResult:
    """Not wrong: REINFORCE with truncated importance weights, of which none has a gradient on purpose."""
    tokens = PolicyTokens.of(inputs, name="truncated_weights")
    factor = tokens.log_ratio.detach().exp().clamp(max=2.0)
    term = -factor * tokens.advantages * tokens.logprobs
    return tokens.result(term, kl_coef=kl_coef, kl_estimator=kl_estimator)


# ---- all of them -----------------------------------------------------------------------------------------------------

TRUNCATED_WEIGHTS = faulty("TruncatedWeights", "holds importance weights fixed, as it should", seen_by="")

FROM_SAVED_BATCHES = faulty("GRPO", "samples nothing, as its spec says", seen_by="", samples=False)

NO_CLASS = faulty("never", "names a function", seen_by="A02", saying="expected a class derived from")
UNEXPLAINED = faulty("GRPO", "an option without help", seen_by="A03", config=Unexplained, saying="baseline has no help")
NEVER_UNSET, NO_CHOICE = {"kl_coef": 0.1}, {"overlong": "drop"}
DEFAULT_OF_KL = faulty("GRPO", "a default that is none", seen_by="A05", defaults=NEVER_UNSET, saying="'kl_coef', which")
DEFAULT_UNKNOWN = faulty("GRPO", "a default of no choice", seen_by="A05", defaults=NO_CHOICE, saying="overlong")
WITH_CRITIC = {ACTOR: RoleKind.POLICY, "critic": RoleKind.CRITIC}
WITHOUT_THE_ROLE = faulty("WithACritic", "no objective", seen_by="A05", roles=WITH_CRITIC, saying="has ['actor'],")
PASSES_OF_NOBODY = faulty("PassesOfNobody", "passes of no role", seen_by="A05", saying="names the role 'critic'; its ")
REFUSES_ITS_DEFAULTS = faulty("GRPO", "its check accepts nothing", seen_by="A05", check=never, saying="learns nothing")

ASKS_FOR_ROWS = faulty("AsksForRows", "reads a row of no run", seen_by="A06", saying="the rows 'difficulty'")
ASKS_FOR_COLUMNS = faulty("AsksForColumns", "its loss reads a column", seen_by="A06", saying="the columns 'scores'")
WRITES_INTO_REWARDS = faulty("WritesIntoRewards", "centres in place", seen_by="A07", saying="writes into 'rewards'")
WRITES_INTO_COLUMNS = faulty("WritesIntoColumns", "clamps in place", seen_by="A07", saying="writes into 'advantages'")
AT_PROMPTS_TOO = faulty("AtPromptsToo", "prompts have advantages", seen_by="A08", saying="outside loss tokens")
DRAWS = faulty("Draws", "is another each time", seen_by="A08", saying="the same twice")
READS_PROMPTS = faulty("ReadsPrompts", "reads prompts", seen_by="A09", saying="in the column 'rollout_logprobs'")
EARLIER_COUNT_MORE = faulty("EarlierCountMore", "uses the order", seen_by="A10", saying="with samples in another order")
FIRST_OF_THE_BEST = faulty("FirstOfTheBest", "the first wins", seen_by="A10", saying="with samples in another order")
NUMBERS_OF_PROMPTS = faulty("NumbersOfPrompts", "uses numbers", seen_by="A10", saying="with other numbers for prompts")
FORGETS_EQUAL_REWARDS = faulty("ForgetsEqualRewards", "divides rounding", seen_by="A11", saying="expected exactly 0")
SCALES_BY_THE_BATCH = faulty("ScalesByTheBatch", "needs the batch", seen_by="A18", saying="set by_prompt=False")
IGNORES_THE_MASK = faulty("IgnoresTheMask", "multiplies NaN by 0", seen_by="A12", saying="at tokens of weight 0")
MEAN_OF_MICRO_BATCH = faulty("MeanOfMicroBatch", "a micro-batch's mean", seen_by="A13", saying="normalize nothing")
DETACHES = faulty("Detaches", "has no gradient", seen_by="A14", saying="has no gradient in some micro-batch")
DETACHES_A_PART = faulty("DetachesAPart", "learns from the good", seen_by="A14", saying="nor is it the policy gradient")
HOLDS_A_NEGATIVE_FACTOR = faulty("HoldsANegativeFactor", "the wrong side", seen_by="A14", saying="points away from the")
WRONG_SIGN = faulty("WrongSign", "unlearns what is good", seen_by="A14", saying="so give it the other sign")
DETACHES_ENTROPY = faulty("DetachesEntropy", "a constant bonus", seen_by="A14", saying="respect to entropy is 0")
SUM_OF_MEANS = faulty("SumOfMeans", "a mean of means", seen_by="A15", saying="the metric 'advantage' of the actor")
OTHER_RATIO = faulty("OtherRatio", "means another ratio", seen_by="A16", saying="the metric 'ratio' of the actor")
COMPARES_SAMPLES = faulty("ComparesSamples", "forgets episodes", seen_by="A17", saying="with more samples of an")
TAKES_A_METRIC = faulty("TakesAMetric", "core's metric", seen_by="A16", saying="has the metric 'train/grad_norm'")

FAULTY: dict[str, FaultySpec] = {
    f"{__name__}:{name}": spec for name, spec in list(vars().items()) if isinstance(spec, FaultySpec)
}
