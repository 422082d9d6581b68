"""Find a loss by registered name or `module:function`, and check its parameters before anything is trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from corerl.algorithms.losses import Loss, LossInputs, LossResult, clipped, value, weighted_logprobs
from corerl.config.functions import imported, signature_of
from corerl.errors import ConfigError, ContractError
from corerl.messages import did_you_mean
from corerl.types import LossSpec, Output, Scalar

LOSSES: Mapping[str, Loss] = {"clipped": clipped, "value": value, "weighted_logprobs": weighted_logprobs}


def resolve_loss(spec: LossSpec) -> Callable[[LossInputs], LossResult]:
    """The loss with its parameters bound. ConfigError if the name or a parameter is unknown, or a parameter is missing.

    Cheap to call at every step: recent results are cached.
    """
    return _resolved(spec.name, tuple(sorted(spec.params.items())))


@lru_cache(maxsize=64)  # bounded: an adaptive coefficient makes a new entry at every step
def _resolved(loss: str, given: tuple[tuple[str, Scalar], ...]) -> Callable[[LossInputs], LossResult]:
    params: dict[str, Any] = dict(given)
    function = find_loss(loss)
    parameters = _parameters(function, name=loss)
    named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    unknown = [name for name in params if name not in named]
    if unknown and len(named) == len(parameters):
        raise ConfigError(
            f"loss {loss!r} has no parameter {unknown[0]!r}; it takes: {', '.join(named) or 'none'}"
            + did_you_mean(unknown[0], named)
        )
    needed = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.default is p.empty]
    missing = [name for name in needed if name not in params]
    if missing:
        raise ConfigError(
            f"{_called(function, name=loss)} with the options {', '.join(params) or 'none'}, not "
            f"{missing[0]!r}; read that from inputs, or give it a default"
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
    fields = {**own.params, **common}
    function = find_loss(name)
    if function is value:
        raise ConfigError(f"algorithm.loss={name!r} is the loss of a critic; choose a loss for the policy")
    parameters = _parameters(function, name=name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters}
    for coefficient in ("entropy_coef", "kl_coef"):
        if fields[coefficient] and not takes_any and coefficient not in taken:
            raise ConfigError(
                f"algorithm.{coefficient}={fields[coefficient]}, but loss {name!r} has no such parameter; "
                f"set it to 0, or add it to the function"
            )
    unknown = [] if takes_any or name != own.name else [each for each in own.params if each not in taken]
    if unknown:
        raise ConfigError(
            f"loss {name!r} of the algorithm has no parameter {unknown[0]!r}; it takes: {', '.join(sorted(taken))}"
        )
    spec = LossSpec(
        name=name,
        params={each: given for each, given in fields.items() if takes_any or each in taken},
        outputs=tuple(dict.fromkeys([*own.outputs, Output.LOGPROBS, Output.ENTROPY])),
    )
    resolve_loss(spec)
    return spec


def find_loss(name: str) -> Loss:
    """The loss of this name, or the user's. Raises ConfigError if there is none."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ConfigError(
            f"unknown loss {name!r}; known: {', '.join(sorted(LOSSES))}, or 'module:function'"
            + did_you_mean(name, LOSSES)
        )
    return imported(name, setting="algorithm.loss")


def _parameters(function: Loss, *, name: str) -> list[inspect.Parameter]:
    """The parameters after the first, which is the LossInputs. ConfigError unless all of them can be passed by name."""
    signature = signature_of(function)
    if signature is None:
        raise ConfigError(f"loss {name!r} has no readable signature; wrap it in a function of Python")
    inputs, others = list(signature.parameters.values())[:1], list(signature.parameters.values())[1:]
    by_name = all(p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in others)
    if not inputs or inputs[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD) or not by_name:
        raise ConfigError(
            f"{_called(function, name=name)}; make its first parameter positional, and let all others be passed by name"
        )
    return others


def _called(function: Loss, *, name: str) -> str:
    """The start of an error message: the loss's signature, and how it is called."""
    return (
        f"loss {name!r} takes {inspect.signature(function)}, but is called as f(inputs: LossInputs, **options) -> "
        "LossResult (of corerl.algorithms.losses)"
    )
