"""The named losses of the API as plain sums over tokens, and what clients send for them as rows for the ranks.

Position i of a datum's inputs is about its target i, which is token i + 1 of the row: the row of a datum is its tokens,
then its last target. Targets that are other tokens, or several, are a column. Only tokens that count are summed, and
how a step is split into calls changes nothing.

`cross_entropy` is sum_t -weights_t * logprobs_t, over all targets of each token, with weights of any sign: clients send
the derivatives of a loss of their own, negated. It is CoreRL's `weighted_logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from corerl import LossSpec, SampleBatch
from corerl.algorithms import LossInputs, LossResult, PolicyTokens, TensorMetric
from corerl.backend import resolve_loss
from corerl.types import TARGETS as GIVEN
from corerl.types import Array, BoolArray, FloatArray, IntArray, Reduction, offsets_of
from corerl_tinker.requests import Pass, Refused

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK, LOW, HIGH = "sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold"
# As corerl calls what clients send: the gradient of a loss by the log-probs, and those of the old policy.
SLOPES, OLD = "logprob_weights", "old_logprobs"


# ---- the losses ------------------------------------------------------------------------------------------------------


def importance_sampling(inputs: LossInputs) -> LossResult:
    """sum_t -r_t A_t with the ratio r_t = exp(logprobs_t - old_logprobs_t), whose logarithm is clamped to +-20 here and
    in the next three, lest one token make the step infinite."""
    tokens = PolicyTokens.of(inputs, name="importance_sampling")
    return _sum(-tokens.log_ratio.exp() * tokens.advantages, tokens.counted)


def ppo(inputs: LossInputs, *, clip_low_threshold: float, clip_high_threshold: float) -> LossResult:
    """sum_t -min(r_t A_t, clip(r_t, low, high) A_t). Schulman et al. 2017, eq. 7."""
    tokens = PolicyTokens.of(inputs, name="ppo")
    return _clipped(tokens, tokens.log_ratio.exp(), clip_low_threshold, clip_high_threshold)


def cispo(inputs: LossInputs, *, clip_low_threshold: float, clip_high_threshold: float) -> LossResult:
    """sum_t -sg(clip(r_t, low, high)) A_t logprobs_t, where sg stops the gradient. MiniMax 2025, eq. 4 and 5."""
    tokens = PolicyTokens.of(inputs, name="cispo")
    weight = tokens.log_ratio.detach().exp().clamp(clip_low_threshold, clip_high_threshold)
    return _sum(-weight * tokens.advantages * tokens.logprobs, tokens.counted)


def gspo(inputs: LossInputs, *, clip_low_threshold: float, clip_high_threshold: float) -> LossResult:
    """PPO's loss with s_t = sg(s) p_t / sg(p_t) as the ratio, where s is the geometric mean of the ratios of a row's
    tokens in the column `sequence_ratio_mask`. Zheng et al. 2025, eq. 13 and 14."""
    tokens = PolicyTokens.of(inputs, name="gspo")
    own, mask = tokens.log_ratio.detach(), (tokens.column(RATIO_MASK) != 0).to(tokens.logprobs.dtype)
    # Both means are over all counted tokens of the row, whose number cancels. A row without the mask has no advantages.
    mean = tokens.sample_mean(own * mask) / tokens.sample_mean(mask).clamp(min=1e-9)
    ratio = (mean + tokens.logprobs - tokens.logprobs.detach()).exp()
    return _clipped(tokens, ratio, clip_low_threshold, clip_high_threshold)


def dro(inputs: LossInputs, *, beta: float) -> LossResult:
    """sum_t -(logprobs_t A_t - beta / 2 (logprobs_t - old_logprobs_t)^2), over all tokens, those without an advantage
    too. Richemond et al. 2024, "Offline Regularised Reinforcement Learning for LLMs Alignment", with A as the reward
    less the value."""
    tokens = PolicyTokens.of(inputs, name="dro")
    apart = tokens.logprobs - tokens.column(OLD)
    return _sum(-(tokens.logprobs * tokens.advantages - 0.5 * beta * apart * apart), tokens.counted)


def _clipped(tokens: PolicyTokens, ratio: Tensor, low: float, high: float) -> LossResult:
    gain = (ratio * tokens.advantages).minimum(ratio.clamp(low, high) * tokens.advantages)
    return _sum(-gain, tokens.counted)


def _sum(terms: Tensor, counted: Tensor) -> LossResult:
    loss = terms.sum()
    return LossResult(loss, {"loss": TensorMetric(loss.detach(), counted.sum(), Reduction.LOSS)})


# ---- what clients send for them --------------------------------------------------------------------------------------


@frozen
class Named:
    """A loss that clients can name."""

    name: str  # as a LossSpec has it
    needs: tuple[str, ...] = (LOGPROBS, ADVANTAGES)  # of a datum's inputs, besides the targets
    settings: Mapping[str, float | None] = field(factory=dict)  # with their defaults; None: it has to be given

    def counted(self, inputs: Mapping[str, Array]) -> BoolArray:
        """The targets that are summed, in their shape."""
        if WEIGHTS in self.needs:
            return np.asarray(inputs[WEIGHTS] != 0)
        every = np.full(len(inputs[ADVANTAGES]), "beta" in self.settings)
        return np.asarray(every | (inputs[ADVANTAGES] != 0) | (inputs.get(RATIO_MASK, every) != 0))


LOSSES: Mapping[str, Named] = {
    "cross_entropy": Named("weighted_logprobs", (WEIGHTS,)),
    "importance_sampling": Named(f"{__name__}:importance_sampling"),
    "ppo": Named(f"{__name__}:ppo", settings={LOW: 0.8, HIGH: 1.2}),
    "cispo": Named(f"{__name__}:cispo", settings={LOW: 0.0, HIGH: 4.0}),
    # The thresholds of its paper.
    "gspo": Named(f"{__name__}:gspo", (LOGPROBS, ADVANTAGES, RATIO_MASK), {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}),
    "dro": Named(f"{__name__}:dro", settings={"beta": None}),
}
ELSEWHERE = {
    "stable_reinforce": "what it needs of the sampling is not recorded here; give the recipe another loss, such as "
    "loss_fn=importance_sampling",
    "custom": "losses of a client are not run here; give forward_backward_custom a function instead of a handle, which "
    "the client runs itself",
}


@frozen(kw_only=True)
class Rows:
    """A pass as ranks take it: N tokens of all datums, each with one token more than it has inputs."""

    samples: SampleBatch
    loss: LossSpec
    known: BoolArray  # [N, K] the target is an id of the vocabulary, as all that count are
    shapes: tuple[tuple[int, ...], ...]  # of each datum's targets
    forward_only: bool

    def outputs(self, logprobs: FloatArray) -> tuple[FloatArray, ...]:
        """The log-probs of each datum's targets in their shape, from those of the rows, [N] or [N, K]; NaN where a
        target that does not count is no id."""
        found = np.where(self.known, logprobs.reshape(self.known.shape), np.nan).astype(np.float32)
        rows = np.split(found, self.samples.offsets[1:-1])
        return tuple(row[1:, : math.prod(of[1:])].reshape(of) for row, of in zip(rows, self.shapes, strict=True))

    def value(self, logprobs: FloatArray) -> float:
        """The loss, from the log-probs [N]."""
        columns = {name: torch.from_numpy(np.asarray(column)) for name, column in self.samples.columns.items()}
        columns["weights"] = columns["loss_mask"].float()
        bounds = torch.from_numpy(self.samples.offsets)
        inputs = LossInputs(logprobs=torch.from_numpy(logprobs).float(), columns=columns, bounds=bounds)
        return float(resolve_loss(self.loss)(inputs).loss)


# A token whose gradient is not finite, so that no step is taken with it, and its loss.
INFINITE = (
    SampleBatch(
        tokens=np.zeros(2, np.int64),
        offsets=np.array([0, 2]),
        columns={"loss_mask": np.array([False, True]), SLOPES: np.array([0.0, np.inf], np.float32)},
        row_columns={"group": np.zeros(1, np.int64)},
    ),
    LossSpec(name=LOSSES["cross_entropy"].name),
)


def rows_of(wanted: Pass, *, vocabulary: int, longest: int) -> Rows:
    """The rows of a pass, of at most `longest` tokens (0: any number) below `vocabulary`. Raises Refused."""
    if wanted.loss in ELSEWHERE:
        raise Refused(f"loss_fn={wanted.loss!r} is not served: {ELSEWHERE[wanted.loss]}")
    if wanted.loss not in LOSSES:
        raise Refused(f"unknown loss_fn={wanted.loss!r}; there are {', '.join(LOSSES)}")
    named = LOSSES[wanted.loss]
    settings, datums = _settings(wanted, named), _Datums.of(wanted)
    tokens, inputs = wanted.tokens, _inputs(wanted, named)
    if longest and (over := np.flatnonzero(datums.lengths >= longest)).size:
        raise Refused(
            f"datum {over[0]}: {datums.lengths[over[0]]} tokens and a last target are more than the context length "
            f"{longest}; shorten it"
        )
    datums.require(
        (tokens >= 0) & (tokens < vocabulary),
        lambda at, _: f"token {tokens[at]} is not in the vocabulary of {vocabulary} tokens",
    )
    for name, value in inputs.items():
        datums.require(np.isfinite(value), lambda *_, name=name: f"{name} has values that are not finite")
    if RATIO_MASK in inputs:
        datums.require_ratios(inputs[RATIO_MASK], inputs[ADVANTAGES])
    targets, counted = inputs.pop(TARGETS).astype(np.int64), named.counted(inputs)
    known: BoolArray = np.asarray((targets >= 0) & (targets < vocabulary))
    datums.require(
        known | ~counted, lambda at, place: f"target {place} is {targets[at]}, where ids are from 0 to {vocabulary - 1}"
    )
    renamed = {WEIGHTS: SLOPES, LOGPROBS: OLD}
    columns = {
        renamed.get(name, name): datums.shifted(np.where(counted, value, 0).astype(np.float32))
        for name, value in inputs.items()
    }
    if SLOPES in columns:
        columns[SLOPES] = -columns[SLOPES]
    columns["loss_mask"] = datums.shifted(np.asarray(counted.reshape(len(tokens), -1).any(1)))
    row_tokens, known = datums.rows(tokens, targets, known), datums.shifted(known)
    ids = datums.shifted(targets.astype(np.int32)) * known
    if ids.ndim > 1 or (known & (ids != row_tokens)).any():
        columns[GIVEN] = ids
    return Rows(
        samples=SampleBatch(
            tokens=row_tokens,
            offsets=datums.offsets,
            columns=columns,
            row_columns={"group": np.arange(len(datums.lengths))},
        ),
        loss=LossSpec(name=named.name, params=settings),
        known=known.reshape(len(known), -1),
        shapes=wanted.shapes,
        forward_only=wanted.forward_only,
    )


@frozen
class _Datums:
    """Where D datums are among their M tokens, and in their rows, which have N = M + D."""

    lengths: IntArray  # [D]
    starts: IntArray  # [D]
    offsets: IntArray  # [D + 1] of the rows
    places: IntArray  # [M] of a datum's tokens in the rows, where its targets are one place further

    @classmethod
    def of(cls, wanted: Pass) -> _Datums:
        lengths = np.array([shape[0] for shape in wanted.shapes])
        places = np.arange(len(wanted.tokens)) + np.repeat(np.arange(len(lengths)), lengths)
        return cls(lengths, offsets_of(lengths)[:-1], offsets_of(lengths + 1), places)

    def require(self, holds: Array, sentence: Callable[[tuple[int, ...], list[int]], str]) -> None:
        """Raise Refused where something does not hold, [M] or [M, K]; the sentence is of that index, and of the place
        in its datum."""
        if not holds.all():
            at = tuple(np.argwhere(~holds)[0].tolist())
            datum = int(np.searchsorted(self.starts, at[0], side="right")) - 1
            raise Refused(f"datum {datum}: {sentence(at, [at[0] - int(self.starts[datum]), *at[1:]])}")

    def require_ratios(self, mask: Array, advantages: Array) -> None:
        advantages, mask = (np.logical_or.reduceat(each != 0, self.starts) for each in (advantages, mask))
        if (without := np.flatnonzero(advantages & ~mask)).size:
            raise Refused(
                f"datum {without[0]}: {RATIO_MASK} is 0 everywhere, so that the row has no ratio; set it to 1 at the "
                "sampled tokens"
            )

    def shifted(self, values: Array) -> Array:
        """[M, ...] by target -> [N, ...] by token of the rows, with 0 at the first ones."""
        found = np.zeros((self.offsets[-1], *values.shape[1:]), values.dtype)
        found[self.places + 1] = values
        return found

    def rows(self, tokens: IntArray, targets: Array, known: BoolArray) -> IntArray:
        """[N]: after a datum's tokens its last target or, if that is no id, the last token once more."""
        last = self.starts + self.lengths - 1
        found = np.empty(self.offsets[-1], np.int64)
        found[self.places] = tokens
        first = (last, 0)[: targets.ndim]  # of several targets
        found[self.offsets[1:] - 1] = np.where(known[first], targets[first], tokens[last])
        return found


def _settings(wanted: Pass, named: Named) -> dict[str, float]:
    if unknown := sorted(wanted.config.keys() - named.settings.keys()):
        known = ", ".join(named.settings) or "none"
        raise Refused(f"loss_fn_config: {wanted.loss} has no {unknown[0]!r}; its settings: {known}")
    settings = {}
    for name, value in {**named.settings, **wanted.config}.items():
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise Refused(f"loss_fn_config: {wanted.loss} needs {name!r}, a finite number; got {value!r}")
        settings[name] = float(value)
    if LOW in settings and settings[LOW] > settings[HIGH]:
        raise Refused(f"{LOW} is above {HIGH}; ratios are clipped to between the two")
    return settings


def _inputs(wanted: Pass, named: Named) -> dict[str, Array]:
    """What the loss takes, [M] each; of `cross_entropy` they may be [M, K]."""
    loss, found, takes = wanted.loss, dict(wanted.inputs), {TARGETS, *named.needs}
    if wrong := sorted(takes - found.keys()) or sorted(found.keys() - takes - {WEIGHTS}):
        has = ", ".join(sorted(found)) or "nothing"
        raise Refused(f"loss_fn_inputs: {wrong[0]}: {loss} takes {', '.join(sorted(takes))}; got {has}")
    if WEIGHTS not in takes:
        if several := [shape for shape in wanted.shapes if len(shape) > 1]:
            raise Refused(f"{TARGETS} has the shape {list(several[0])}, where {loss} takes one target of each token")
        weights = found.pop(WEIGHTS, np.ones(1))
        if ((weights != 1) & (found[ADVANTAGES] != 0)).any():
            raise Refused(f"{loss} has no weights other than 1; multiply the advantages by them")
    return found
