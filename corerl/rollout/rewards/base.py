"""Score samples with reward functions: each gets a number, or the reason why it has none."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import numbers
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise, repeat
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from attrs import Factory, evolve, field, frozen
from numpy.typing import NDArray

from corerl.config.functions import signature_of
from corerl.errors import RewardError
from corerl.messages import did_you_mean, place, short_repr
from corerl.rollout import loop
from corerl.types import BoolArray, FloatArray, SampleBatch

if TYPE_CHECKING:
    from corerl.data.prompts import Prompt
    from corerl.engines.fleet import Counted
    from corerl.rollout.sampler import Rollout


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
PartSums = Mapping[str, tuple[float, int]]  # by name: the sum of a part's values, and the number of samples with it


def added(*sums: PartSums) -> PartSums:
    """The sums of several calls together."""
    total: dict[str, tuple[float, int]] = {}
    for each in sums:
        for name, (value, count) in each.items():
            before, counted = total.get(name, (0.0, 0))
            total[name] = before + value, counted + count
    return total


@frozen(kw_only=True)
class Scores:
    """The rewards of a rollout's samples, and which of them failed."""

    rewards: FloatArray  # [B] reward.failed_value for failed samples
    failures: Mapping[str, int] = field(factory=dict)  # samples by kind of failure
    first: str = ""  # the first failure in sample order, as one line
    # [B] True for failed samples
    failed: BoolArray = field(default=Factory(lambda self: np.zeros(len(self.rewards), np.bool_), takes_self=True))
    parts: PartSums = field(factory=dict)  # over all samples that did not fail
    values: Mapping[str, FloatArray] = field(factory=dict)  # [B] of each part; NaN for samples that lack it

    def part(self, name: str, *, setting: str) -> FloatArray:
        """[B] the part that `setting` names, but the reward of samples that lack it, such as failed ones; "" is the
        reward itself. Raises RewardError if no sample has it."""
        if not name or self.failed.all():
            return self.rewards
        if name not in self.values:
            known = f"its parts are {', '.join(map(repr, self.values))}" if self.values else "the reward has no parts"
            raise RewardError(f"{setting}: {name!r} is no part of the reward; {known}{did_you_mean(name, self.values)}")
        values = self.values[name]
        return np.where(np.isnan(values), self.rewards, values)


class Scorer(Protocol):
    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """Raises RewardError if all samples fail, unless they are only a `part` of a batch: the reward must be
        broken."""


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
    def waits(self) -> bool:
        """Whether the function is async, so that it can score many samples at once."""
        return _is_async(self.function)

    @functools.cached_property
    def takes_tokens(self) -> bool:
        return takes_tokens(self.function)

    def __call__(self, prompt: Prompt, response: str, tokens: Tokens = ()) -> float:
        """The reward. Raises RewardError, naming the sample, if the function raises or returns no finite number."""
        outcome = self.outcome((prompt, response, tokens))
        if isinstance(outcome, Failure):
            raise RewardError(outcome.message)
        return outcome.reward

    def outcome(self, sample: Sample) -> Outcome:
        """The sample's reward, or why it has none."""
        try:
            value = self.called(sample)
            if inspect.isawaitable(value):
                value = loop.begin(_awaited(value)).result()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit would end the run, silently and with any status
            return self._raised(error, sample)
        return self._judged(value, sample)

    def outcomes(self, samples: Sequence[Sample], on_progress: Counted | None = None) -> list[Outcome]:
        """The samples' rewards, of an async function awaited many at once."""
        found: list[Outcome] = []
        if on_progress is not None:
            on_progress(0, len(samples))
        for first in range(0, len(samples), AT_ONCE):
            some = samples[first : first + AT_ONCE]
            futures = [self.start(sample) for sample in some] if self.waits else []
            for outcome in (each.result() for each in futures) if self.waits else map(self.outcome, some):
                found.append(outcome)
                if on_progress is not None:
                    on_progress(len(found), len(samples))
        return found

    def start(self, sample: Sample, limit: float | None = None) -> Future[Outcome]:
        """Call an async reward, and wait for it in the event loop, at most `limit` seconds. What is not async runs in
        this thread, and is part of the sample's time."""
        started = time.monotonic()
        try:
            value = self.called(sample)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed: Future[Outcome] = Future()
            failed.set_result(self._raised(error, sample))
            return failed
        left = None if limit is None else limit - (time.monotonic() - started)
        return loop.begin(self._outcome_within(limit, left, value, sample))

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
        return self._judged(value, sample)

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
            if (reward := number(value)) is None:
                raise NoNumber(f"returned {short_repr(value)}, wanted a finite number,")
            if self.weights:
                raise NoNumber(
                    f"returned {short_repr(value)}, but its weights are of numbers by name; return a dict of these, "
                    "or remove the weights,"
                )
            return Judged(reward=reward)
        value = {name: each for name, each in value.items() if each is not None}
        if not value:
            return None
        parts = {str(name): part for name, each in value.items() if (part := number(each)) is not None}
        if self.weights and (unknown := parts.keys() - self.weights.keys()):
            raise NoNumber(
                f"returned the part {short_repr(min(unknown))}, but its weights list only "
                f"{', '.join(map(repr, self.weights))}; add it there, with 0 to leave it out of the reward,"
            )
        reward = number(sum(self.weights.get(name, 1.0) * part for name, part in parts.items()))
        if len(parts) < len(value) or reward is None:
            raise NoNumber(f"returned {short_repr(value)}, wanted finite numbers by name,")
        return Judged(reward=reward, parts=parts)

    def _judged(self, value: Any, sample: Sample) -> Outcome:
        try:
            if (judged := self.judged(value)) is None:
                by_name = "finite numbers by name" if isinstance(value, Mapping) else "a finite number"
                raise NoNumber(f"returned {short_repr(value)}, wanted {by_name},")
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

    def score(self, rollout: Rollout, *, part: bool = False, on_progress: Counted | None = None) -> Scores:
        """Score in this process, without a time limit. `on_progress` gets how many samples are scored, and how many
        there are."""
        samples = samples_of(rollout, tokens=self.takes_tokens)
        return gathered(self.outcomes(samples, on_progress), self.failed_value, part=part)


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
    def waits(self) -> bool:
        return any(term.reward.waits for term in self.terms)

    @functools.cached_property
    def takes_tokens(self) -> bool:
        return any(term.reward.takes_tokens for term in self.terms)

    def called(self, sample: Sample) -> Any:
        # Async ones last: if another one raises, none of them was called in vain.
        order = sorted(range(len(self.terms)), key=lambda place: self.terms[place].reward.waits)
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


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


async def _all(values: Sequence[Any]) -> list[Any]:
    waiting = iter(await asyncio.gather(*filter(inspect.isawaitable, values)))
    return [next(waiting) if inspect.isawaitable(value) else value for value in values]


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def takes_tokens(function: Callable[..., Any]) -> bool:
    """Whether a reward function has a parameter of its own for the response's token ids."""
    signature = signature_of(function)
    return signature is not None and "tokens" in list(signature.parameters)[2:]


class OutcomeScorer:
    """Takes the rewards that samples bring, and scores the others with another scorer."""

    def __init__(self, scorer: Scorer, *, failed_value: float) -> None:
        self._scorer = scorer
        self._failed_value = failed_value

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """An episode is scored once, by its last answer, and all its rows get that reward. Raises RewardError if every
        sample fails, unless they are only a `part` of a batch."""
        episodes, episode_of = rollout.batch.episodes
        if len(episodes) == len(episode_of):
            return self._score(rollout, part)
        scores = self._score(rollout.at(episodes), part)
        values = {name: each[episode_of] for name, each in scores.values.items()}
        return evolve(scores, rewards=scores.rewards[episode_of], failed=scores.failed[episode_of], values=values)

    def _score(self, rollout: Rollout, part: bool) -> Scores:
        outcomes = rollout.outcomes
        unknown = np.array([row for row, outcome in enumerate(outcomes) if outcome is None], dtype=np.int64)
        if not len(outcomes) or len(unknown) == len(outcomes):
            return self._scorer.score(rollout, part=part)
        brought = [each if isinstance(each, Failure | Judged) else Judged(reward=each or 0.0) for each in outcomes]
        known = gathered(brought, self._failed_value, part=True)
        rewards, failed, first = known.rewards.copy(), known.failed.copy(), known.first
        failures, parts, values = Counter(known.failures), known.parts, {**known.values}
        if len(unknown):
            scores = self._scorer.score(rollout.at(unknown), part=True)
            rewards[unknown], failed[unknown] = scores.rewards, scores.failed
            failures.update(scores.failures)
            parts = added(parts, scores.parts)
            for name, each in scores.values.items():
                values.setdefault(name, np.full(len(rewards), np.nan, np.float32))[unknown] = each
            if scores.first and failed.argmax() in unknown:
                first = scores.first
        if failed.all() and not part:
            raise RewardError(f"{first}; none of the {len(failed)} samples has a reward")
        return Scores(rewards=rewards, failures=dict(failures), first=first, failed=failed, parts=parts, values=values)


class Scoring:
    """Scores rollouts one after the other, as rewards need not be thread-safe, while the event loop goes on."""

    def __init__(
        self,
        scorer: Scorer,
        call: Callable[[Callable[[], Scores]], Awaitable[Scores]],
        noted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`call` runs the scorer in a thread that may wait; its turns are in contexts of `noted`."""
        self._scorer = scorer
        self._call = call
        self._noted = noted
        self._turn = asyncio.Lock()

    def by(self, scorer: Scorer) -> Scoring:
        """With another scorer, in turns with this one."""
        other = copy.copy(self)
        other._scorer = scorer
        return other

    async def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        """As `Scorer.score`. If it is cancelled, the scorer still ends its turn."""
        await self._turn.acquire()
        scoring = asyncio.ensure_future(self._scored(rollout, part=part))
        scoring.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(scoring)

    async def _scored(self, rollout: Rollout, *, part: bool) -> Scores:
        with self._noted():
            return await self._call(functools.partial(self._scorer.score, rollout, part=part))


def samples_of(rollout: Rollout, *, tokens: bool) -> list[Sample]:
    """[B] prompt, response, and the response's tokens, or none, as they are many to send to another process."""
    found = _tokens_of(rollout.batch) if tokens else repeat((), len(rollout.texts))
    return [
        (rollout.prompts[group], text, ids)
        for group, text, ids in zip(rollout.batch.rows["group"], rollout.texts, found, strict=True)
    ]


def _tokens_of(batch: SampleBatch) -> Iterator[Tokens]:
    """[B] each response's tokens with the one that ended it; of an episode, its last answer's."""
    sampled = batch.columns.get("loss_mask")
    for first, last in pairwise(batch.offsets.tolist()):
        row = np.flatnonzero(sampled[first:last]) if sampled is not None else np.arange(last - first)
        begins = row[np.flatnonzero(np.diff(row) > 1)[-1:] + 1]  # of the last run of sampled tokens
        begin = begins[0] if len(begins) else row[0] if len(row) else 0
        yield batch.tokens[first + begin : first + row[-1] + 1].astype(np.int32) if len(row) else ()


def gathered(outcomes: Sequence[Outcome], failed_value: float, *, part: bool = False) -> Scores:
    """Collect outcomes. Raises RewardError if all are failures, unless they are only a `part` of a batch."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    first = failures[0].message if failures else ""
    if failures and len(failures) == len(outcomes) and not part:
        raise RewardError(first + (f"; all {len(outcomes)} samples failed" if len(outcomes) > 1 else ""))
    rewards = [failed_value if isinstance(outcome, Failure) else outcome.reward for outcome in outcomes]
    judged = [outcome for outcome in outcomes if isinstance(outcome, Judged)]
    values: dict[str, FloatArray] = {}
    for row, each in enumerate(outcomes):
        for name, value in each.parts.items() if isinstance(each, Judged) else ():
            values.setdefault(name, np.full(len(outcomes), np.nan, np.float32))[row] = value
    return Scores(
        rewards=np.array(rewards, dtype=np.float32),
        failures=dict(Counter(failure.kind for failure in failures)),
        first=first,
        failed=np.array([isinstance(outcome, Failure) for outcome in outcomes], dtype=np.bool_),
        parts=added(*({name: (value, 1) for name, value in each.parts.items()} for each in judged if each.parts)),
        values=values,
    )


def number(value: Any) -> float | None:
    """A number that float32 can hold, or a scalar array or tensor of one, as a float; None for anything else."""
    if not isinstance(value, float):
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of numpy, torch or jax
            value = value.item()
        if not isinstance(value, numbers.Real):
            return None
    return float(value) if -LARGEST <= value <= LARGEST else None


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
