"""Reward functions, the user's or built in: each gives a sample a number, or the reason why it has none."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import numbers
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, fields, frozen
from numpy.typing import NDArray

from corerl.config.functions import imported, require_callable, signature_of, suggestion
from corerl.errors import ConfigError
from corerl.event_loop import start_user_coroutine
from corerl.messages import did_you_mean, place, short_repr

if TYPE_CHECKING:
    from corerl.config.schema import RewardConfig
    from corerl.data.prompts import Prompt
    from corerl.types import OnProgress


@frozen(kw_only=True)
class Failure:
    """Why a sample has no reward."""

    kind: str  # raised, no-number, timeout, died
    message: str  # one line: the reward, what it did, on which sample


@frozen(kw_only=True)
class Judged:
    """A sample's reward."""

    reward: float
    parts: Mapping[str, float] = field(factory=dict)  # the values that it is the weighted sum of, if there are several
    turns: tuple[float, ...] = ()  # the rewards of an episode's turns that it is the sum of, if there are any


Outcome = Judged | Failure
Tokens = Sequence[int] | NDArray[np.int32]
Sample = tuple["Prompt", str, Tokens]  # prompt, response, the response's tokens if the reward takes them

LARGEST = float(np.finfo(np.float32).max)
AT_ONCE = 32  # samples of an async reward that are awaited at once, and that a process gets in one message
LONGEST, LONGEST_ERROR = 80, 1000  # characters of a text that a message shows, and of an error's, which may quote one


class NoNumber(ValueError):
    """A reward function's value is no reward; the text says what it returned."""


@frozen(kw_only=True)
class Reward:
    """A reward function with its name in the config and its options."""

    name: str
    # (prompt, response, **options) -> number, or numbers by name; or an awaitable of that. One that has a parameter
    # `tokens` also gets the response's token ids.
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(factory=dict)
    weights: Mapping[str, float] = field(factory=dict)  # of the numbers by name; empty: 1 each
    failed_value: float = 0.0  # reward of a sample on which the function fails

    # Looked up once, which takes longer than a cheap reward.
    @functools.cached_property
    def is_async(self) -> bool:
        """Whether the function is async, so that it can score many samples at once."""
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    @functools.cached_property
    def takes_tokens(self) -> bool:
        return takes_tokens(self.function)

    def outcomes(self, samples: Sequence[Sample], on_progress: OnProgress | None = None) -> list[Outcome]:
        """The samples' rewards, of an async function awaited many at once."""
        found: list[Outcome] = []
        if on_progress is not None:
            on_progress(0, len(samples))
        size = AT_ONCE if self.is_async else 1
        for first in range(0, len(samples), size):
            for started in [self.start(sample) for sample in samples[first : first + size]]:
                found.append(ended(started))
                if on_progress is not None:
                    on_progress(len(found), len(samples))
        return found

    def start(self, sample: Sample, limit: float | None = None) -> Outcome | Future[Outcome]:
        """Call the function, and wait for what is async in the users' event loop, at most `limit` seconds. What is not
        async runs in this thread, and is part of the sample's time: its outcome is there at once."""
        started = time.monotonic()
        try:
            value = self.called(sample)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit would end the run, silently and with any status
            return self._raised(error, sample)
        if not inspect.isawaitable(value):
            return self._outcome(value, sample)
        left = None if limit is None else limit - (time.monotonic() - started)
        return start_user_coroutine(self._outcome_within(limit, left, value, sample))

    async def _outcome_within(
        self, limit: float | None, left: float | None, waiting: Awaitable[Any], sample: Sample
    ) -> Outcome:
        try:
            async with asyncio.timeout(left) as clock:
                value = await waiting
                if (task := asyncio.current_task()) and task.cancelling():  # it has cancelled itself: raised here,
                    await asyncio.sleep(0)  # not where the outcome is waited for
        except BaseException as error:  # such as asyncio's CancelledError, which would end all other samples too
            if clock.expired() and isinstance(error, TimeoutError):
                return self.late(limit or 0.0, sample)
            return self._raised(error, sample)
        return self._outcome(value, sample)

    def called(self, sample: Sample) -> Any:
        """What the function returns, which may be an awaitable."""
        prompt, response, tokens = sample
        seen = {"tokens": np.asarray(tokens).tolist()} if self.takes_tokens else {}
        return self.function(prompt, response, **seen, **self.options)

    def judged(self, value: Any) -> Judged | None:
        """What the function returned, as a reward; None if it says nothing of the sample: None, or no part that is
        not None. Raises NoNumber."""
        if value is None:
            return None
        if not isinstance(value, Mapping):
            reward = number(value)
            if reward is None or self.weights:
                raise NoNumber(f"returned {short_repr(value)}, wanted {self._wanted(by_name=bool(self.weights))},")
            return Judged(reward=reward)
        value = {name: each for name, each in value.items() if each is not None}
        if not value:
            return None
        parts = {str(name): part for name, each in value.items() if (part := number(each)) is not None}
        unknown = parts.keys() - self.weights.keys() if self.weights else ()
        reward = number(sum(self.weights.get(name, 1.0) * part for name, part in parts.items()))
        if unknown or len(parts) < len(value) or reward is None:
            raise NoNumber(f"returned {short_repr(value)}, wanted {self._wanted(by_name=True)},")
        return Judged(reward=reward, parts=parts)

    def _wanted(self, *, by_name: bool) -> str:
        named = f"finite numbers by name{', of ' if self.weights else ''}{', '.join(self.weights)}"
        return named if by_name else "a finite number"

    def _outcome(self, value: Any, sample: Sample) -> Outcome:
        try:
            if (judged := self.judged(value)) is None:
                wanted = self._wanted(by_name=isinstance(value, Mapping))
                raise NoNumber(f"returned {short_repr(value)}, wanted {wanted},")
            return judged
        except NoNumber as error:
            return self.failure("no-number", str(error), sample)
        except Exception as error:  # of the value's own code, such as a tensor's that is on no device
            return self.failure("no-number", f"returned a value that raised {described(error)}", sample)

    def _raised(self, error: BaseException, sample: Sample) -> Failure:
        if isinstance(error, SystemExit):
            return self.failure("died", f"ended its process (sys.exit({short_repr(error.code)}))", sample)
        return self.failure("raised", f"raised {described(error)}", sample)

    def failure(self, kind: str, what: str, sample: Sample) -> Failure:
        prompt, response, _ = sample
        where = f"on prompt {prompt.index} ({short(prompt.text)}) with the response {short(response)}"
        return Failure(kind=kind, message=" ".join(f"reward {self.name!r} {what} {where}".split()))

    def late(self, limit: float, sample: Sample) -> Failure:
        return self.failure("timeout", f"took longer than reward.timeout={limit:g} seconds", sample)


@frozen(kw_only=True)
class Term:
    """One of several rewards."""

    label: str  # its name in metrics
    weight: float
    reward: Reward


@frozen(kw_only=True)
class WeightedSum(Reward):
    """Several rewards as one: the sum of each one's value times its weight, without those that say nothing of a sample.
    Its parts are each one's value by its label, and the parts of one that has parts as `label.part`."""

    function: Callable[..., Any] = sum  # never called
    terms: Sequence[Term]

    @functools.cached_property
    def is_async(self) -> bool:
        return any(term.reward.is_async for term in self.terms)

    @functools.cached_property
    def takes_tokens(self) -> bool:
        return any(term.reward.takes_tokens for term in self.terms)

    def called(self, sample: Sample) -> Any:
        # Async ones last: if another one raises, none of them was called in vain.
        order = sorted(range(len(self.terms)), key=lambda place: self.terms[place].reward.is_async)
        found = {place: self.terms[place].reward.called(sample) for place in order}
        values = [found[place] for place in range(len(self.terms))]
        return _all(values) if any(map(inspect.isawaitable, values)) else values

    def judged(self, value: Any) -> Judged | None:
        total = 0.0
        parts: dict[str, float] = {}
        for term, each in zip(self.terms, value, strict=True):
            try:
                judged = term.reward.judged(each)
            except NoNumber as error:
                raise NoNumber(f"({term.label}) {error}") from error
            if judged is None:
                continue
            total += term.weight * judged.reward
            parts |= {
                term.label: judged.reward,
                **{f"{term.label}.{name}": part for name, part in judged.parts.items()},
            }
        if number(total) is None:
            raise NoNumber(f"has the sum {total!r}, wanted a finite number,")
        return Judged(reward=total, parts=parts) if parts else None


def ended(started: Outcome | Future[Outcome]) -> Outcome:
    """The outcome of a call that `Reward.start` started."""
    return started.result() if isinstance(started, Future) else started


async def _all(values: Sequence[Any]) -> list[Any]:
    waiting = iter(await asyncio.gather(*filter(inspect.isawaitable, values)))
    return [next(waiting) if inspect.isawaitable(value) else value for value in values]


def takes_tokens(function: Callable[..., Any]) -> bool:
    """Whether a reward function has a parameter of its own for the response's token ids."""
    signature = signature_of(function)
    return signature is not None and "tokens" in list(signature.parameters)[2:]


def number(value: Any) -> float | None:
    """A number that float32 can hold, or a scalar array or tensor of one, as a float; None for anything else."""
    if not isinstance(value, float):
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of numpy, torch or jax
            value = value.item()
        if not isinstance(value, numbers.Real):
            return None
    return float(value) if -LARGEST <= value <= LARGEST else None


# ---- built-in rewards, and those that a config names -----------------------------------------------------------------


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


BUILT_IN: dict[str, Callable[..., Any]] = {"position-match": position_match, "exact-match": exact_match}


def reward_of(config: RewardConfig, *, table: str = "reward") -> Reward:
    """The reward that `[reward]`, or another table, describes. Raises ConfigError if there is no such reward, or a
    signature does not fit."""
    if not config.functions:
        reward = find_reward(config.name, config.options, config.weights, table=table)
        return evolve(reward, failed_value=config.failed_value)
    if config.name != fields(type(config)).name.default or config.options or config.weights:
        raise ConfigError(
            f"{table}.functions: cannot be combined with {table}.name, {table}.options or {table}.weights; move them "
            f"into an entry of {table}.functions, or remove one of the two"
        )
    labels = [each.label or each.name.rpartition(":")[2] for each in config.functions]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(f"{table}.functions: two functions are named {twice[0]!r}; give each a different label")
    for label, other in itertools.permutations(labels, 2):
        if other.startswith(f"{label}."):  # as is the metric of a part of the former
            raise ConfigError(
                f"{table}.functions: {other!r} could also be a part of {label!r}; give it a label that does not begin "
                f"with '{label}.'"
            )
    terms = [
        Term(
            label=label,
            weight=each.weight,
            reward=find_reward(each.name, each.options, each.weights, table=f"{table}.functions[{place}]"),
        )
        for place, (label, each) in enumerate(zip(labels, config.functions, strict=True))
    ]
    return WeightedSum(name=" + ".join(labels), terms=terms, failed_value=config.failed_value)


def require_part(reward: Reward, part: str, *, setting: str) -> None:
    """Raise ConfigError if the config says which parts a reward has, and this is another name. The parts of a function
    without weights are known once it is called."""
    known = [term.label for term in reward.terms] if isinstance(reward, WeightedSum) else list(reward.weights)
    if part and part not in known and "." not in part and (known or reward.name in BUILT_IN):
        has = f"its parts are {', '.join(map(repr, known))}" if known else f"{reward.name!r} has no parts"
        raise ConfigError(f"{setting}: {part!r} is no part of the reward; {has}{did_you_mean(part, known)}")


def find_reward(
    name: str, options: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, table: str = "reward"
) -> Reward:
    """Look up a reward by name; `table` holds it in the config. Raises ConfigError if the name is unknown, or its
    signature does not fit."""
    if name not in BUILT_IN and ":" not in name:
        own = "write your own as 'module:function', where module.py is in the working directory or installed"
        raise ConfigError(
            f"{table}.name: unknown reward {name!r}; built in: {', '.join(sorted(BUILT_IN))}"
            + (did_you_mean(name, BUILT_IN) or f"; {own}{suggestion(name)}")
        )
    function = BUILT_IN.get(name) or imported(name, setting=f"{table}.name")
    tokens: dict[str, Any] = {"tokens": []} if takes_tokens(function) else {}
    require_callable(
        function,
        "function(prompt, response, **options)",
        None,
        "",
        setting=f"{table}.name={name!r}",
        options={**options, **tokens},
    )
    return Reward(name=name, function=function, options=options, weights=weights or {})


# ---- error messages --------------------------------------------------------------------------------------------------


def described(error: BaseException) -> str:
    """Describe the error with the innermost line of user code in its traceback, or else the innermost line."""
    ours = error.__traceback__.tb_frame if error.__traceback__ else None  # where the user's function is called
    where = place(error, _users_own) or place(error, lambda frame: frame is not ours)
    try:
        return f"{type(error).__name__}: {_cut(str(error), LONGEST_ERROR)}{where}"
    except BaseException:  # its __str__ fails
        return type(error).__name__ + where


STANDARD = os.path.dirname(os.__file__)  # Python's own library


def _users_own(frame: FrameType) -> bool:
    """Whether code is the user's: neither installed nor CoreRL's, whose wheels may lie in a source tree."""
    file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")).partition(".")[0]
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts) or Path(file).is_relative_to(STANDARD)
    return not installed and not file.startswith("<") and package != "corerl" and not package.startswith("corerl_")


def short(text: str) -> str:
    """A text as a message quotes it."""
    return repr(_cut(text, LONGEST))


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
