"""Score samples with built-in rewards or the user's own `module:function`; failures name the sample."""

from __future__ import annotations

import inspect
import numbers
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from attrs import Factory, field, frozen

from corerl.config.functions import imported
from corerl.errors import ConfigError, RewardError
from corerl.messages import nearest, place
from corerl.types import BoolArray, FloatArray

if TYPE_CHECKING:
    from corerl.data.prompts import Prompt
    from corerl.rollout.sampler import Rollout


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


@frozen(kw_only=True)
class Failure:
    """Why a sample has no reward."""

    kind: str  # raised, no-number, timeout, died
    message: str  # one line: the reward, what it did, on which sample


@frozen(kw_only=True)
class Scores:
    """The rewards of a rollout's samples, and which of them failed."""

    rewards: FloatArray  # [B] reward.failed_value for failed samples
    failures: Mapping[str, int] = field(factory=dict)  # samples by kind of failure
    first: str = ""  # the first failure in sample order, as one line
    # [B] True for failed samples
    failed: BoolArray = field(default=Factory(lambda self: np.zeros(len(self.rewards), np.bool_), takes_self=True))


class Scorer(Protocol):
    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """Raises RewardError if all samples fail, unless they are only a `part` of a batch: the reward must be
        broken."""


LARGEST = float(np.finfo(np.float32).max)
LONGEST = 80  # characters of a text that a message shows


@frozen(kw_only=True)
class Reward:
    """A reward function with its name in the config and its options."""

    name: str
    function: Callable[..., Any]  # (prompt, response, **options) -> number
    options: Mapping[str, Any] = field(factory=dict)
    failed_value: float = 0.0  # reward of a sample on which the function fails

    def __call__(self, prompt: Prompt, response: str) -> float:
        """The reward. Raises RewardError, naming the sample, if the function raises or returns no finite number."""
        outcome = self.outcome(prompt, response)
        if isinstance(outcome, Failure):
            raise RewardError(outcome.message)
        return outcome

    def outcome(self, prompt: Prompt, response: str) -> float | Failure:
        """The sample's reward, or why it has none."""
        try:
            value = self.function(prompt, response, **self.options)
        except SystemExit as error:  # in the driver it would end the run, silently and with any status
            return self.failure("died", f"ended its process (sys.exit({error.code!r}))", prompt, response)
        except Exception as error:
            return self.failure("raised", f"raised {told(error)}", prompt, response)
        if not is_number(value):
            return self.failure("no-number", f"returned {value!r}, wanted a finite number,", prompt, response)
        return float(value)

    def failure(self, kind: str, what: str, prompt: Prompt, response: str) -> Failure:
        sample = f"on prompt {prompt.index} ({short(prompt.text)}) with the response {short(response)}"
        return Failure(kind=kind, message=" ".join(f"reward {self.name!r} {what} {sample}".split()))

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """Score in this process, one sample at a time, without a time limit."""
        return gathered([self.outcome(*sample) for sample in samples_of(rollout)], self.failed_value, part=part)


class InTurn:
    """Serializes another scorer across threads, so that rewards need not be thread-safe."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._busy = threading.Lock()

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        with self._busy:
            return self._scorer.score(rollout, part=part)


def samples_of(rollout: Rollout) -> list[tuple[Prompt, str]]:
    """[B] (prompt, response) pairs."""
    groups = rollout.batch.rows["group"]
    return [(rollout.prompts[group], text) for group, text in zip(groups, rollout.texts, strict=True)]


def gathered(outcomes: Sequence[float | Failure], failed_value: float, *, part: bool = False) -> Scores:
    """Collect outcomes. Raises RewardError if all are failures, unless they are only a `part` of a batch."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    first = failures[0].message if failures else ""
    if failures and len(failures) == len(outcomes) and not part:
        raise RewardError(first + (f"; all {len(outcomes)} samples failed" if len(outcomes) > 1 else ""))
    rewards = [failed_value if isinstance(outcome, Failure) else outcome for outcome in outcomes]
    return Scores(
        rewards=np.array(rewards, dtype=np.float32),
        failures=dict(Counter(failure.kind for failure in failures)),
        first=first,
        failed=np.array([isinstance(outcome, Failure) for outcome in outcomes], dtype=np.bool_),
    )


def is_number(value: Any) -> bool:
    """Whether `value` is a number that float32 can hold. numpy's bool is not a Real, its other scalars are."""
    number = isinstance(value, numbers.Real | np.bool_)
    return number and bool(-LARGEST <= value <= LARGEST)


def told(error: BaseException) -> str:
    """Describe the error with the innermost line of user code in its traceback, or else the innermost line."""
    ours = error.__traceback__.tb_frame if error.__traceback__ else None  # where the user's function is called
    where = place(error, _users_own) or place(error, lambda frame: frame is not ours)
    try:
        return f"{type(error).__name__}: {error}{where}"
    except Exception:  # its __str__ fails
        return type(error).__name__ + where


# Code outside these directories and site-packages is the user's.
NOT_THE_USERS = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]))


def _users_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not installed and not file.startswith("<") and not any(map(Path(file).is_relative_to, NOT_THE_USERS))


def short(text: str) -> str:
    return repr(text if len(text) <= LONGEST else text[: LONGEST - 3] + "...")


def resolve_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """Look up a reward by name. Raises ConfigError if there is none, or its signature does not fit."""
    function = BUILT_IN.get(name)
    if function is None:
        if ":" not in name:
            near = nearest(name, BUILT_IN)
            raise ConfigError(
                f"reward.name: unknown reward {name!r}{f', did you mean {near!r}?' if near else ''}; "
                f"built in: {', '.join(sorted(BUILT_IN))}; write your own as 'module:function'"
            )
        function = imported(name, setting="reward.name")
    _require_callable(name, function, options)
    return Reward(name=name, function=function, options=options)


def require_any_thread(reward: Reward, prompt: Prompt, *, setting: str) -> None:
    """Try a reward in a thread, as a run with `setting` calls it. Raises ConfigError if it needs the main thread, which
    alone may set signals; other errors may be those of this sample alone."""
    refused: list[BaseException] = []

    def call() -> None:
        try:
            reward.function(prompt, prompt.answer, **reward.options)
        except BaseException as error:
            refused.extend(each for each in _causes(error) if "main thread" in str(each))

    thread = threading.Thread(target=call, name="reward trial", daemon=True)
    thread.start()
    thread.join()
    if refused:
        raise ConfigError(
            f"reward.processes: 0 scores in a thread of the driver with {setting}, but reward {reward.name!r} needs "
            f"the main thread ({told(refused[-1])}); set reward.processes to at least 1, or "
            "rollout.source='synchronous'"
        )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _require_callable(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"reward.name={name!r} is an async function, wanted a plain one; run an event loop inside it")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function written in C may have no signature to check
    try:
        signature.bind_partial(None, "")
    except TypeError as error:
        raise ConfigError(
            f"reward.name={name!r} takes {signature}, but is called as function(prompt, response, **options): {error}; "
            "make its first two parameters positional"
        ) from error
    order = [word.lower() for word in list(signature.parameters)[:2]]
    if len(order) == 2 and order[0] in RESPONSES and order[1] == "prompt":
        raise ConfigError(
            f"reward.name={name!r} takes {signature}, but is called as function(prompt, response, **options); "
            "swap its first two parameters"
        )
    try:
        signature.bind(None, "", **options)
    except TypeError as error:
        raise ConfigError(
            f"reward.options={dict(options)} do not fit reward {name!r}, which is called with (prompt, response, "
            f"**options): {error}"
        ) from error
