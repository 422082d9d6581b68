"""Look up the reward functions that `[reward]` names, built in or the user's, and check that they can be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields

from corerl.config.functions import imported, meant, signature_of
from corerl.errors import ConfigError
from corerl.messages import did_you_mean
from corerl.rollout.rewards.base import Reward, Term, WeightedSum, takes_tokens

if TYPE_CHECKING:
    from corerl.config.schema import RewardConfig
    from corerl.data.prompts import Prompt


def position_match(prompt: Prompt, response: str) -> float:
    """The share of positions that match, over the longer of answer and response."""
    answer = _answer(prompt)
    right = sum(wanted == got for wanted, got in zip(answer, response, strict=False))
    return right / max(len(answer), len(response))


def exact_match(prompt: Prompt, response: str) -> float:
    """1 if the response equals the answer, ignoring surrounding white space, else 0."""
    return float(response.strip() == _answer(prompt).strip())


def _answer(prompt: Prompt) -> str:
    if not prompt.answer:
        raise ValueError("the prompt has no answer to compare with; set data.answer_key, or use a reward of your own")
    return prompt.answer


RESPONSES = ("response", "completion", "answer", "output", "text")  # parameter names that suggest a response
BUILT_IN: dict[str, Callable[..., Any]] = {"position-match": position_match, "exact-match": exact_match}


def reward_of(config: RewardConfig, *, table: str = "reward") -> Reward:
    """The reward that `[reward]`, or another table, describes. Raises ConfigError if there is none, or a signature does
    not fit."""
    if not config.functions:
        reward = resolve_reward(config.name, config.options, config.weights, table=table)
        return evolve(reward, failed_value=config.failed_value)
    if config.name != fields(type(config)).name.default or config.options or config.weights:
        raise ConfigError(
            f"{table}.functions: cannot be combined with {table}.name, {table}.options or {table}.weights; move them "
            f"into an entry of {table}.functions, or remove one of the two"
        )
    labels = [each.label or each.name.rpartition(":")[2] for each in config.functions]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{table}.functions: two functions are named {label!r}; give each a different label")
        if inside := [other for other in labels if other.startswith(f"{label}.")]:
            raise ConfigError(
                f"{table}.functions: {inside[0]!r} could also be a part of {label!r}; give it a label that does not "
                f"begin with '{label}.'"
            )
    terms = [
        Term(
            label=label,
            weight=each.weight,
            reward=resolve_reward(each.name, each.options, each.weights, table=f"{table}.functions[{place}]"),
        )
        for place, (label, each) in enumerate(zip(labels, config.functions, strict=True))
    ]
    return WeightedSum(name=" + ".join(labels), terms=terms, failed_value=config.failed_value)


def resolve_reward(
    name: str, options: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, table: str = "reward"
) -> Reward:
    """Look up a reward by name; `table` holds it in the config. Raises ConfigError if there is none, or its signature
    does not fit."""
    require_known(name, table=table)
    function = BUILT_IN.get(name) or imported(name, setting=f"{table}.name")
    _require_callable(name, function, options, table)
    return Reward(name=name, function=function, options=options, weights=weights or {})


def require_known(name: str, *, table: str = "reward") -> None:
    """Raise ConfigError if a reward's name is neither a built-in one nor, by its form, a function's."""
    if name not in BUILT_IN and ":" not in name:
        own = "write your own as 'module:function', where module.py is in the working directory or installed"
        raise ConfigError(
            f"{table}.name: unknown reward {name!r}; built in: {', '.join(sorted(BUILT_IN))}"
            + (did_you_mean(name, BUILT_IN) or f"; {own}{meant(name)}")
        )


def require_part(reward: Reward, name: str, *, setting: str) -> None:
    """Raise ConfigError if a reward has no part of this name, as far as its config tells: a function without weights
    may return any."""
    if isinstance(reward, WeightedSum):
        known = [term.label for term in reward.terms]
        known += [f"{term.label}.{part}" for term in reward.terms for part in term.reward.weights]
        free = any(name.startswith(f"{term.label}.") for term in reward.terms if not term.reward.weights)
    else:
        known, free = list(reward.weights), not reward.weights and reward.name not in BUILT_IN
    if name and not free and name not in known:
        has = f"its parts are {', '.join(map(repr, known))}" if known else f"{reward.name!r} has no parts"
        raise ConfigError(f"{setting}: {name!r} is no part of the reward; {has}{did_you_mean(name, known)}")


def _require_callable(name: str, function: Callable[..., Any], options: Mapping[str, Any], table: str) -> None:
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind_partial(None, "")
    except TypeError as error:
        raise ConfigError(
            f"{table}.name={name!r} takes {signature}, but is called as function(prompt, response, **options): "
            f"{error}; make its first two parameters positional"
        ) from error
    order = [word.lower() for word in list(signature.parameters)[:2]]
    if len(order) == 2 and order[0] in RESPONSES and order[1] == "prompt":
        raise ConfigError(
            f"{table}.name={name!r} takes {signature}, but is called as function(prompt, response, **options); "
            "swap its first two parameters"
        )
    if takes_tokens(function) and "tokens" in options:
        raise ConfigError(
            f"{table}.options.tokens: reward {name!r} gets the response's token ids under this name; rename the option"
        )
    seen: dict[str, Any] = {"tokens": []} if takes_tokens(function) else {}
    try:
        signature.bind(None, "", **seen, **options)
    except TypeError as error:
        raise ConfigError(
            f"{table}.options={dict(options)} do not fit reward {name!r}, which is called with (prompt, response, "
            f"**options): {error}"
        ) from error
