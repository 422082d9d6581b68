"""The named losses of the API as plain sums over tokens, and what clients send for them as rows for the ranks.

Position i of a datum's inputs is about its target i, which is token i + 1 of the row: the row of a datum is its tokens,
then its last target. Targets that are other tokens, or several, are a column. Only tokens that count are summed, and
how a step is split into calls changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from corerl import LossSpec, SampleBatch
from corerl.algorithms import LossInputs, LossResult, PolicyTokens, TensorMetric
from corerl.backend import resolve_loss
from corerl.types import TARGETS as GIVEN
from corerl.types import Array, BoolArray, FloatArray, IntArray, Reduction, offsets_of
from corerl_tinker.requests import Datum, Pass, Refused

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK, LOW, HIGH = "sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold"
OLD = "old_logprobs"  # as corerl calls what clients send as `logprobs`
KNOWN = "known"


# ---- the losses ------------------------------------------------------------------------------------------------------


def cross_entropy(inputs: LossInputs) -> LossResult:
    """sum_t -weights_t * logprobs_t, over all targets of each token, with weights of any sign: clients send the
    derivatives of a loss of their own, negated."""
    assert inputs.logprobs is not None
    weights = inputs.columns["token_weights"]
    counted = (weights != 0) & (inputs.columns["weights"] != 0).view(-1, *[1] * (weights.dim() - 1))
    terms = -weights * inputs.logprobs
    return _sum(terms.where(counted, 0), counted)


def importance_sampling(inputs: LossInputs) -> LossResult:
    """sum_t -r_t A_t with the ratio r_t = exp(logprobs_t - old_logprobs_t), whose logarithm is clamped to +-20 here and
    in the next three losses, lest one token make the step infinite."""
    tokens = PolicyTokens.of(inputs, name="importance_sampling")
    return _sum(-tokens.log_ratio.exp() * tokens.advantages, tokens.counted)


def ppo(inputs: LossInputs) -> LossResult:
    """sum_t -min(r_t A_t, clip(r_t, low_t, high_t) A_t). Schulman et al. 2017, eq. 7."""
    tokens = PolicyTokens.of(inputs, name="ppo")
    return _sum(-_clipped_gain(tokens, tokens.log_ratio.exp()), tokens.counted)


def cispo(inputs: LossInputs) -> LossResult:
    """sum_t -sg(clip(r_t, low_t, high_t)) A_t logprobs_t, where sg stops the gradient. MiniMax 2025, eq. 4 and 5."""
    tokens = PolicyTokens.of(inputs, name="cispo")
    weight = tokens.log_ratio.detach().exp().clamp(tokens.column(LOW), tokens.column(HIGH))
    return _sum(-weight * tokens.advantages * tokens.logprobs, tokens.counted)


def gspo(inputs: LossInputs) -> LossResult:
    """PPO's loss with s_t = sg(s) p_t / sg(p_t) as the ratio, where s is the geometric mean of the ratios of a row's
    tokens in the column `sequence_ratio_mask`. Zheng et al. 2025, eq. 13 and 14."""
    tokens = PolicyTokens.of(inputs, name="gspo")
    own, mask = tokens.log_ratio.detach(), (tokens.column(RATIO_MASK) != 0).to(tokens.logprobs.dtype)
    # Both means are over all counted tokens of the row, whose number cancels. A row without the mask has no advantages.
    mean = tokens.sample_mean(own * mask) / tokens.sample_mean(mask).clamp(min=1e-9)
    ratio = (mean + tokens.logprobs - tokens.logprobs.detach()).exp()
    return _sum(-_clipped_gain(tokens, ratio), tokens.counted)


def dro(inputs: LossInputs, *, beta: float) -> LossResult:
    """sum_t -(logprobs_t A_t - beta / 2 (logprobs_t - old_logprobs_t)^2), over all tokens, those without an advantage
    too. Richemond et al. 2024, "Offline Regularised Reinforcement Learning for LLMs Alignment", with A as the reward
    less the value."""
    tokens = PolicyTokens.of(inputs, name="dro")
    apart = tokens.logprobs - tokens.column(OLD)
    return _sum(-(tokens.logprobs * tokens.advantages - 0.5 * beta * apart * apart), tokens.counted)


def _clipped_gain(tokens: PolicyTokens, ratio: Tensor) -> Tensor:
    bounded = ratio.clamp(tokens.column(LOW), tokens.column(HIGH))
    return (ratio * tokens.advantages).minimum(bounded * tokens.advantages)


def _sum(terms: Tensor, counted: Tensor) -> LossResult:
    loss = terms.sum()
    return LossResult(loss, {"loss": TensorMetric(loss.detach(), counted.sum(), Reduction.LOSS)})


# ---- what clients send for them --------------------------------------------------------------------------------------


@frozen
class Named:
    """A loss that clients can name."""

    function: Callable[..., LossResult]
    needs: tuple[str, ...] = (LOGPROBS, ADVANTAGES)  # of a datum's inputs, besides the targets
    settings: Mapping[str, float | None] = field(factory=dict)  # with their defaults; None: it has to be given

    @property
    def bounds(self) -> tuple[str, ...]:
        """The settings that each token may have of its own, as an input."""
        return (LOW, HIGH) if LOW in self.settings else ()

    def counted(self, inputs: Mapping[str, Array]) -> BoolArray:
        """The targets that are summed, in their shape."""
        if WEIGHTS in self.needs:
            return np.asarray(inputs[WEIGHTS] != 0)
        every = np.full(len(inputs[ADVANTAGES]), self.function is dro)
        return np.asarray(every | (inputs[ADVANTAGES] != 0) | (inputs.get(RATIO_MASK, every) != 0))


LOSSES: Mapping[str, Named] = {
    "cross_entropy": Named(cross_entropy, (WEIGHTS,)),
    "importance_sampling": Named(importance_sampling),
    "ppo": Named(ppo, settings={LOW: 0.8, HIGH: 1.2}),
    "cispo": Named(cispo, settings={LOW: 0.0, HIGH: 4.0}),
    "gspo": Named(gspo, (LOGPROBS, ADVANTAGES, RATIO_MASK), {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}),  # of the paper
    "dro": Named(dro, settings={"beta": None}),
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
        columns={"loss_mask": np.array([False, True]), "token_weights": np.array([0.0, np.inf], np.float32)},
        row_columns={"group": np.zeros(1, np.int64)},
    ),
    LossSpec(name=f"{__name__}:cross_entropy"),
)


def rows_of(wanted: Pass, *, vocabulary: int, longest: int) -> Rows:
    """The rows of a pass, of at most `longest` tokens (0: any number) below `vocabulary`. Raises Refused."""
    if wanted.loss in ELSEWHERE:
        raise Refused(f"loss_fn={wanted.loss!r} is not served: {ELSEWHERE[wanted.loss]}")
    if wanted.loss not in LOSSES:
        raise Refused(f"unknown loss_fn={wanted.loss!r}; there are {', '.join(LOSSES)}")
    named = LOSSES[wanted.loss]
    settings = _settings(wanted, named)
    tokens, columns = [], []
    for number, datum in enumerate(wanted.datums):
        try:
            row = _row(datum, named, settings, vocabulary=vocabulary, longest=longest, loss=wanted.loss)
        except Refused as error:
            raise Refused(f"datum {number}: {error.message}") from None
        tokens.append(row[0])
        columns.append(row[1])
    together = {name: _together([each[name] for each in columns]) for name in columns[0]}
    samples = SampleBatch(
        tokens=np.concatenate(tokens),
        offsets=offsets_of([len(row) for row in tokens]),
        row_columns={"group": np.arange(len(tokens))},
    )
    known, targets = together.pop(KNOWN), together.pop(TARGETS)
    if targets.ndim > 1 or (known & (targets != samples.tokens)).any():
        together[GIVEN] = targets
    params = {name: value for name, value in settings.items() if name not in named.bounds}
    return Rows(
        samples=samples.with_columns(**together),
        loss=LossSpec(name=f"{__name__}:{wanted.loss}", params=params),
        known=known.reshape(len(known), -1),
        shapes=tuple(datum.inputs[TARGETS].shape for datum in wanted.datums),
    )


def _together(parts: Sequence[Array]) -> Array:
    """[N] or [N, K] of rows [n] or [n, k], the most that one has; [N] if that is 1. 0 is what others lack."""
    rows = [part.reshape(len(part), -1) for part in parts]
    most = max(row.shape[1] for row in rows)
    if any(row.shape[1] < most for row in rows):
        rows = [np.pad(row, ((0, 0), (0, most - row.shape[1]))) for row in rows]
    found = np.concatenate(rows)
    return found if most > 1 else found[:, 0]


def _settings(wanted: Pass, named: Named) -> dict[str, float]:
    if unknown := sorted(wanted.config.keys() - named.settings.keys()):
        known = ", ".join(named.settings) or "none"
        raise Refused(f"loss_fn_config: {wanted.loss} has no {unknown[0]!r}; its settings: {known}")
    settings = {}
    for name, default in named.settings.items():
        value = wanted.config.get(name, default)
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise Refused(f"loss_fn_config: {wanted.loss} needs {name!r}, a finite number; got {value!r}")
        settings[name] = float(value)
    return settings


def _row(
    datum: Datum, named: Named, settings: Mapping[str, float], *, vocabulary: int, longest: int, loss: str
) -> tuple[IntArray, dict[str, Array]]:
    """The tokens [n + 1], and the columns, of which KNOWN says where TARGETS are ids."""
    count = len(datum.tokens)
    if longest and count + 1 > longest:
        raise Refused(f"{count} tokens and a last target are more than the context length {longest}; shorten it")
    if (outside := (datum.tokens < 0) | (datum.tokens >= vocabulary)).any():
        raise Refused(f"token {datum.tokens[outside][0]} is not in the vocabulary of {vocabulary} tokens")
    inputs = _inputs(datum, named, loss=loss)
    targets = inputs.pop(TARGETS).astype(np.int64)
    counted = named.counted(inputs)
    known: BoolArray = np.asarray((targets >= 0) & (targets < vocabulary))
    if (wrong := counted & ~known).any():
        at = tuple(np.argwhere(wrong)[0])
        place = ", ".join(map(str, at))
        raise Refused(f"target [{place}] is {targets[at]}, where ids are from 0 to {vocabulary - 1}")
    last, there = targets[-1:].reshape(-1)[:1], known[-1:].reshape(-1)[:1]
    tokens = np.concatenate([datum.tokens, np.where(there, last, datum.tokens[-1:])]).astype(np.int64)
    for name in named.bounds:
        inputs.setdefault(name, np.full(count, settings[name], np.float32))
    if named.bounds and (inputs[LOW] > inputs[HIGH]).any():
        raise Refused(f"{LOW} is above {HIGH}; ratios are clipped to between the two")
    if RATIO_MASK in inputs and (inputs[ADVANTAGES] != 0).any() and not (inputs[RATIO_MASK] != 0).any():
        raise Refused(f"{RATIO_MASK} is 0 everywhere, so that the row has no ratio; set it to 1 at the sampled tokens")
    renamed = {WEIGHTS: "token_weights", LOGPROBS: OLD}
    columns = {
        renamed.get(name, name): _shifted(np.where(counted, value, 0).astype(np.float32))
        for name, value in inputs.items()
    }
    columns |= {KNOWN: _shifted(known), TARGETS: _shifted(np.where(known, targets, 0).astype(np.int32))}
    columns["loss_mask"] = _shifted(np.asarray(counted.reshape(count, -1).any(1)))
    return tokens, columns


def _inputs(datum: Datum, named: Named, *, loss: str) -> dict[str, Array]:
    """The inputs by name, [n] each; of `cross_entropy` they may be [n, K]."""
    takes = (TARGETS, *named.needs, *named.bounds)
    found = dict(datum.inputs)
    if missing := [name for name in (TARGETS, *named.needs) if name not in found]:
        raise Refused(f"loss_fn_inputs has no {missing[0]!r}, which {loss} needs; it has {_listed(found)}")
    for name, value in found.items():
        if not np.isfinite(value).all():
            raise Refused(f"{name} has values that are not finite")
    shape = found[TARGETS].shape
    if len(shape) > 1 and WEIGHTS not in named.needs:
        raise Refused(f"{TARGETS} has the shape {list(shape)}, where {loss} takes one target of each token")
    if other := [name for name, value in found.items() if value.shape != shape]:
        raise Refused(f"{other[0]} has the shape {list(found[other[0]].shape)}, and {TARGETS} {list(shape)}")
    weights = found[WEIGHTS] if WEIGHTS in named.needs else found.pop(WEIGHTS, None)
    if ADVANTAGES in found and weights is not None and ((weights != 1) & (found[ADVANTAGES] != 0)).any():
        raise Refused(f"{loss} has no weights other than 1; multiply the advantages by them")
    if unknown := [name for name in found if name not in takes]:
        raise Refused(f"loss_fn_inputs has {unknown[0]!r}, which {loss} does not take; it takes {_listed(takes)}")
    return found


def _listed(names: Sequence[str] | Mapping[str, Array]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _shifted(values: Array) -> Array:
    """[n, ...] by position -> [n + 1, ...] by token of the row."""
    return np.concatenate([np.zeros((1, *values.shape[1:]), values.dtype), values])
