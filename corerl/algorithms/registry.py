"""Find losses and the user's other functions by name, and check that they can be called before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from corerl.algorithms.advantages import broadcast
from corerl.algorithms.base import Advantages, Estimate, Postprocess
from corerl.algorithms.losses import Loss, LossInputs, LossResult, clipped, value, weighted_logprobs
from corerl.config.functions import imported, require_callable, signature_of
from corerl.errors import ConfigError, ContractError, DataError
from corerl.messages import did_you_mean, one_line
from corerl.types import FloatArray, LossSpec, Output, SampleBatch, Scalar

LOSSES: Mapping[str, Loss] = {"clipped": clipped, "value": value, "weighted_logprobs": weighted_logprobs}


def resolve_loss(spec: LossSpec) -> Callable[[LossInputs], LossResult]:
    """The loss with its parameters bound. ConfigError if the name or a parameter is unknown, or a parameter is missing.

    Cheap to call at every step: recent results are cached.
    """
    return _resolved(spec.name, tuple(sorted(spec.params.items())))


@lru_cache(maxsize=64)
def _resolved(loss: str, given: tuple[tuple[str, Scalar], ...]) -> Callable[[LossInputs], LossResult]:
    params: dict[str, Any] = dict(given)
    function = find_loss(loss)
    require_callable(
        function, "f(inputs: LossInputs, **options) -> LossResult", None, setting=f"loss {loss!r}", options=params
    )
    return partial(_called_with, function, params, loss)


def _called_with(function: Loss, params: Mapping[str, Any], name: str, inputs: LossInputs) -> LossResult:
    result: Any = function(inputs, **params)
    if not isinstance(result, LossResult):
        raise ContractError(
            f"loss {name!r} returned a {type(result).__name__}, wanted a corerl.algorithms.LossResult(loss=..., "
            "metrics=...)"
        )
    return result


def policy_loss(own: LossSpec, *, loss: str, entropy_coef: float, kl_coef: float, kl_estimator: str) -> LossSpec:
    """The policy's loss as data: the algorithm's `own` with the common terms of `[algorithm]`, or the user's `loss`,
    which gets those parameters of both that it takes.

    A nonzero coefficient that the loss does not take is a ConfigError. The entropy is always requested, as a metric: if
    entropy_coef is 0 it has no gradient, and only costs one more sum over logits that the log-probs read anyway.
    """
    name = loss or own.name
    common: dict[str, Scalar] = {"entropy_coef": entropy_coef, "kl_coef": kl_coef, "kl_estimator": kl_estimator}
    signature = signature_of(find_loss(name))
    parameters = [] if signature is None else list(signature.parameters.values())[1:]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    taken = {each.name for each in parameters}
    for coefficient in ("entropy_coef", "kl_coef"):
        if common[coefficient] and not takes_any and coefficient not in taken:
            raise ConfigError(
                f"algorithm.{coefficient}={common[coefficient]}, but loss {name!r} has no such parameter; "
                f"set it to 0, or add it to the function"
            )
    if loss:
        given = {**own.params, **common}
        params = {each: value for each, value in given.items() if takes_any or each in taken}
    else:
        params = {**own.params, **{each: value for each, value in common.items() if takes_any or each in taken}}
    outputs = tuple(dict.fromkeys([*own.outputs, Output.LOGPROBS, Output.ENTROPY]))
    spec = LossSpec(name=name, params=params, outputs=outputs)
    resolve_loss(spec)
    return spec


def find_loss(name: str) -> Loss:
    """The loss of this name, or the user's. Raises ConfigError for an unknown name."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ConfigError(
            f"unknown loss {name!r}; known: {', '.join(sorted(LOSSES))}, or 'module:function'"
            + did_you_mean(name, LOSSES)
        )
    return imported(name, setting="algorithm.loss")


# ---- the user's functions of a whole batch ---------------------------------------------------------------------------


def users_estimate(name: str) -> Estimate:
    """The function `algorithm.advantages` = 'module:function'. It is called like `Algorithm.advantages`, and returns
    advantages of samples [B] or of tokens [N]. Raises ConfigError if it cannot be imported; calling it raises DataError
    if it returns anything else or raises."""
    function = imported(name, setting="algorithm.advantages")

    def estimate(samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        try:
            found: Any = np.asarray(function(samples, rewards, token_rewards), dtype=np.float32)
        except Exception as error:
            raise DataError(f"algorithm.advantages: {name!r} raised {one_line(error)}") from error
        sizes = [(len(samples),), (len(samples.tokens),)]
        mask = samples.columns["loss_mask"]
        if found.shape not in sizes:
            raise DataError(
                f"algorithm.advantages: {name!r} returned an array of shape {list(found.shape)}, wanted "
                f"[{len(samples)}], a number of each sample, or [{len(samples.tokens)}], of each token"
            )
        per_token = broadcast(found, samples) if found.shape == sizes[0] else np.where(mask, found, np.float32(0.0))
        if not np.isfinite(per_token).all():
            raise DataError(f"algorithm.advantages: {name!r} returned advantages that are not finite")
        return Advantages(advantages=per_token)

    return estimate


def users_postprocess(name: str) -> Postprocess:
    """The function `algorithm.postprocess` = 'module:function', which maps samples with all columns to those to train
    on. Raises ConfigError if it cannot be imported; calling it raises DataError if it raises or returns anything else
    than samples with finite advantages at their loss tokens."""
    function, setting = imported(name, setting="algorithm.postprocess"), f"algorithm.postprocess: {name!r}"

    def postprocess(samples: SampleBatch) -> SampleBatch:
        try:
            found: Any = function(samples)
        except Exception as error:
            raise DataError(f"{setting} raised {one_line(error)}") from error
        if not isinstance(found, SampleBatch):
            what = "None" if found is None else f"a {type(found).__name__}"
            raise DataError(f"{setting} returned {what}, wanted a corerl.types.SampleBatch; return the samples")
        if missing := sorted(samples.names - found.names):
            raise DataError(f"{setting} returned samples without the column {missing[0]!r}; keep it")
        if not np.isfinite(found.columns["advantages"][found.columns["loss_mask"]]).all():
            raise DataError(f"{setting} returned advantages that are not finite")
        return found

    return postprocess
