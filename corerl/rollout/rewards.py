"""What a sample is worth: built-in rewards, the user's own by `module:function`, and errors that name the sample."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from corerl.errors import ConfigError, RewardError
from corerl.types import FloatArray

if TYPE_CHECKING:
    from corerl.data.prompts import Prompt
    from corerl.rollout.sampler import Rollout


def position_match(prompt: Prompt, response: str) -> float:
    """The share of positions that are right, over the longer of answer and response."""
    answer = _answer(prompt)
    right = sum(wanted == got for wanted, got in zip(answer, response, strict=False))
    return right / max(len(answer), len(response))


def exact_match(prompt: Prompt, response: str) -> float:
    """1 where the response is the answer, but for white space around either, else 0."""
    return float(response.strip() == _answer(prompt).strip())


def _answer(prompt: Prompt) -> str:
    if not prompt.answer:
        raise ValueError("the prompt has no answer to compare with; set data.answer_key, or use a reward of your own")
    return prompt.answer


BUILT_IN: dict[str, Callable[..., Any]] = {"position-match": position_match, "exact-match": exact_match}


@frozen(kw_only=True)
class Reward:
    """A reward function together with its name in the config and its options."""

    name: str
    function: Callable[..., Any]  # (prompt, response, **options) -> number
    options: Mapping[str, Any]

    def __call__(self, prompt: Prompt, response: str) -> float:
        """Raises RewardError, naming the sample, where the function raises or returns no finite number."""
        sample = f"on prompt {prompt.index} ({_short(prompt.text)}) with the response {_short(response)}"
        try:
            value = self.function(prompt, response, **self.options)
        except Exception as error:
            raise RewardError(f"reward {self.name!r} raised {type(error).__name__}: {error} {sample}") from error
        # numpy's bool is no Real, and its other scalars are.
        if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
            raise RewardError(f"reward {self.name!r} returned {value!r}, wanted a finite number, {sample}")
        return float(value)


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def resolve_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """The reward of that name; raises ConfigError where there is none, or where it does not take these options."""
    function = BUILT_IN.get(name) or _imported(name)
    try:
        inspect.signature(function).bind(None, "", **options)
    except TypeError as error:
        raise ConfigError(
            f"reward.options={dict(options)} do not fit reward {name!r}, which is called with (prompt, response, "
            f"**options): {error}"
        ) from error
    except ValueError:
        pass  # a function written in C may have no signature to check
    return Reward(name=name, function=function, options=options)


def _imported(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        raise ConfigError(
            f"unknown reward {name!r}{f', did you mean {near[0]!r}?' if near else ''}; "
            f"built in: {', '.join(sorted(BUILT_IN))}; your own is written 'module:function'"
        )
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"reward.name={name!r} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise ConfigError(f"reward.name={name!r} is {function!r}, wanted a function of (prompt, response)")
    return function


def score(reward: Callable[[Prompt, str], float], rollout: Rollout) -> FloatArray:
    """[B] the reward of each sample."""
    groups = rollout.batch.rows["group"]
    return np.array(
        [reward(rollout.prompts[group], text) for group, text in zip(groups, rollout.texts, strict=True)],
        dtype=np.float32,
    )
