"""The named losses of the API as plain sums over tokens, and what clients send for them as rows for the ranks.

Position i of a datum's inputs is about its target i, which is token i + 1 of the row: the row of a datum is its tokens,
then its last target. Targets that are other tokens, or several, are a column. Only tokens that count are summed, and
how a step is split into calls changes nothing.

`cross_entropy` is sum_t -weights_t * logprobs_t, over all targets of each token, with weights of any sign: clients send
the derivatives of a loss of their own, negated. It is CoreRL's `weighted_logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from corerl import LossSpec, SampleBatch
from corerl.algorithms import LossInputs, LossResult, PolicyTokens
from corerl.backend import resolve_loss
from corerl.types import TARGETS as GIVEN
from corerl.types import Array, BoolArray, FloatArray, offsets_of
from corerl_tinker.requests import Datum, Pass, Refused

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK, LOW, HIGH = "sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold"
KNOWN, COUNTED = "known", "counted"
# As corerl calls what clients send: the gradient of a loss by the log-probs, those of the old policy, and targets.
SLOPES, OLD = "logprob_weights", "old_logprobs"
COLUMNS = {WEIGHTS: SLOPES, LOGPROBS: OLD, TARGETS: GIVEN}


# ---- the losses ------------------------------------------------------------------------------------------------------


def importance_sampling(inputs: LossInputs) -> LossResult:
    """sum_t -r_t A_t with the ratio r_t = exp(logprobs_t - old_logprobs_t), whose logarithm is clamped to +-20 here and
    in the next three, lest one token make the step infinite."""
    tokens = PolicyTokens.of(inputs, name="importance_sampling")
    return LossResult((-tokens.log_ratio.exp() * tokens.advantages).sum())


def ppo(inputs: LossInputs, *, clip_low_threshold: float, clip_high_threshold: float) -> LossResult:
    """sum_t -min(r_t A_t, clip(r_t, low, high) A_t). Schulman et al. 2017, eq. 7."""
    tokens = PolicyTokens.of(inputs, name="ppo")
    return _clipped(tokens, tokens.log_ratio.exp(), clip_low_threshold, clip_high_threshold)


def cispo(inputs: LossInputs, *, clip_low_threshold: float, clip_high_threshold: float) -> LossResult:
    """sum_t -sg(clip(r_t, low, high)) A_t logprobs_t, where sg stops the gradient. MiniMax 2025, eq. 4 and 5."""
    tokens = PolicyTokens.of(inputs, name="cispo")
    weight = tokens.log_ratio.detach().exp().clamp(clip_low_threshold, clip_high_threshold)
    return LossResult((-weight * tokens.advantages * tokens.logprobs).sum())


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
    return LossResult(-(tokens.logprobs * tokens.advantages - 0.5 * beta * apart * apart).sum())


def _clipped(tokens: PolicyTokens, ratio: Tensor, low: float, high: float) -> LossResult:
    gain = (ratio * tokens.advantages).minimum(ratio.clamp(low, high) * tokens.advantages)
    return LossResult(-gain.sum())


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


@frozen(kw_only=True)
class Rows:
    """A pass as ranks take it: N tokens of all datums, each with one token more than it has inputs."""

    samples: SampleBatch
    loss: LossSpec
    known: BoolArray  # [N, K] the target is an id of the vocabulary, as all that count are
    shapes: Sequence[tuple[int, ...]]  # of each datum's targets
    forward_only: bool

    @property
    def key(self) -> Hashable:
        """Passes with the same one go through the model together."""
        columns = tuple((name, column.shape[1:]) for name, column in self.samples.columns.items())
        return self.forward_only, self.loss.name, tuple(self.loss.params.items()), columns

    @property
    def size(self) -> int:
        """Bytes: of sparse targets there are few in a body and many here."""
        return sum(each.nbytes for each in (self.samples.tokens, self.known, *self.samples.columns.values()))

    def done(self, logprobs: FloatArray) -> tuple[list[FloatArray], float]:
        """What the pass returns, by the log-probs of its rows, [N] or [N, K]: those of each datum's targets in their
        shape, NaN where a target that does not count is no id; and the loss."""
        found = np.where(self.known, logprobs.reshape(self.known.shape), np.nan).astype(np.float32)
        rows = zip(np.split(found, self.samples.offsets[1:-1]), self.shapes, strict=True)
        columns = {name: torch.from_numpy(np.asarray(column)) for name, column in self.samples.columns.items()}
        columns["weights"] = columns["loss_mask"].float()
        bounds = torch.from_numpy(self.samples.offsets)
        inputs = LossInputs(logprobs=torch.from_numpy(logprobs).float(), columns=columns, bounds=bounds)
        loss = float(resolve_loss(self.loss)(inputs).loss)
        return [row[1:, : math.prod(of[1:])].reshape(of) for row, of in rows], loss


# A token whose gradient is not finite, so that no step is taken with it, and its loss.
INFINITE = (
    SampleBatch(
        tokens=np.zeros(2, np.int64),
        offsets=np.array([0, 2]),
        columns={"loss_mask": np.array([False, True]), SLOPES: np.array([0.0, np.inf], np.float32)},
    ),
    LossSpec(name=LOSSES["cross_entropy"].name),
)


def rows_of(wanted: Pass, *, vocabulary: int, longest: int) -> Rows:
    """The rows of a pass, of at most `longest` tokens (0: any number) below `vocabulary`. Raises Refused."""
    if wanted.loss not in LOSSES:
        raise Refused(f"unknown loss_fn={wanted.loss!r}; there are {', '.join(LOSSES)}")
    named = LOSSES[wanted.loss]
    settings, rows = _settings(wanted, named), list[dict[str, Array]]()
    for number, datum in enumerate(wanted.datums):
        try:
            rows.append(_row(datum, wanted.loss, vocabulary=vocabulary, longest=longest))
        except Refused as refused:
            raise Refused(f"datum {number}: {refused.message}") from refused
    shapes = [row[TARGETS].shape for row in rows]
    offsets = offsets_of([len(datum.tokens) + 1 for datum in wanted.datums])
    most = max(math.prod(shape[1:]) for shape in shapes)
    tokens = np.empty(offsets[-1], np.int64)
    # 0 at the first token of a row, which is no target, and where it has fewer targets than another one.
    columns: dict[str, Array] = {name: np.zeros((len(tokens), most), each.dtype) for name, each in rows[0].items()}
    for datum, row, start, end in zip(wanted.datums, rows, offsets[:-1], offsets[1:], strict=True):
        for name, value in row.items():
            columns[name][start + 1 : end, : value[0].size] = value.reshape(len(value), -1)
        tokens[start : end - 1] = datum.tokens
        # The last target or, if that is no id, the last token once more.
        tokens[end - 1] = columns[TARGETS][end - 1, 0] if columns[KNOWN][end - 1, 0] else datum.tokens[-1]
    known, targets = columns.pop(KNOWN), columns[TARGETS]
    if most == 1 and not (known[:, 0] & (targets[:, 0] != tokens)).any():
        del columns[TARGETS]  # the tokens that come next, as they are without it
    columns["loss_mask"] = np.any(columns.pop(COUNTED), axis=1)
    return Rows(
        samples=SampleBatch(
            tokens=tokens,
            offsets=offsets,
            columns={
                COLUMNS.get(name, name): each.reshape(-1) if most == 1 else each for name, each in columns.items()
            },
        ),
        loss=LossSpec(name=named.name, params=settings),
        known=known,
        shapes=shapes,
        forward_only=wanted.forward_only,
    )


def _row(datum: Datum, loss: str, *, vocabulary: int, longest: int) -> dict[str, Array]:
    """The targets of a datum, and what goes with each, in their shape."""
    named, tokens, found = LOSSES[loss], datum.tokens, dict(datum.inputs)
    takes = {TARGETS, *named.needs}
    if wrong := sorted(takes - found.keys()) or sorted(found.keys() - takes - {WEIGHTS}):
        has = ", ".join(sorted(found)) or "nothing"
        raise Refused(f"loss_fn_inputs: {wrong[0]}: {loss} takes {', '.join(sorted(takes))}; got {has}")
    several, shape = WEIGHTS in takes, found[TARGETS].shape
    for name, value in found.items():
        if value.shape != shape or shape[0] != len(tokens) or len(shape) > 1 + several or not value.size:
            more = f", or [{len(tokens)}, K] for K targets of each token" if several else ""
            raise Refused(f"{name} has the shape {list(value.shape)}, wanted [{len(tokens)}]{more}")
        if not np.isfinite(value).all():
            raise Refused(f"{name} has values that are not finite")
    if not several and ((found.pop(WEIGHTS, 1) != 1) & (found[ADVANTAGES] != 0)).any():
        raise Refused(f"{loss} has no weights other than 1; multiply the advantages by them")
    if RATIO_MASK in found and found[ADVANTAGES].any() and not found[RATIO_MASK].any():
        raise Refused(f"{RATIO_MASK} is 0 everywhere, so that the row has no ratio; set it to 1 at the sampled tokens")
    if longest and len(tokens) >= longest:
        raise Refused(f"{len(tokens)} tokens and a last target are more than the context length {longest}; shorten it")
    if (others := tokens[(tokens < 0) | (tokens >= vocabulary)]).size:
        raise Refused(f"token {others[0]} is not in the vocabulary of {vocabulary} tokens")
    targets = found.pop(TARGETS).astype(np.int64)
    counted, known = named.counted(found), (targets >= 0) & (targets < vocabulary)
    if (wanted := counted & ~known).any():
        place = tuple(np.argwhere(wanted)[0].tolist())
        raise Refused(f"target {list(place)} is {targets[place]}, where ids are from 0 to {vocabulary - 1}")
    row = {name: np.where(counted, value, 0).astype(np.float32) for name, value in found.items()}
    if several:
        row[WEIGHTS] = -row[WEIGHTS]
    return {**row, TARGETS: np.where(known, targets, 0).astype(np.int32), KNOWN: known, COUNTED: counted}


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
