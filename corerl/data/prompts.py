"""Prompts to sample from: split once into training and held-out prompts, and drawn in an order fixed by the seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from attrs import field, frozen

from corerl.errors import CheckpointError, DataError
from corerl.messages import short_repr
from corerl.types import IntArray


def _tuple(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(messages)  # prompts are saved as JSON, which has only lists


@frozen(kw_only=True)
class Prompt:
    """One row of the data, as what is asked of the model."""

    index: int  # in its source; the same prompt has the same index in every run
    text: str  # for a chat: its only message, or all messages as lines `role: content`
    answer: str  # "" if the data has none
    fields: Mapping[str, Any] = field(factory=dict)  # the whole row, for reward functions
    messages: tuple[Mapping[str, Any], ...] = field(default=(), converter=_tuple)  # the chat; () continues the text
    # What the chat template tells the model of, each as in OpenAI's `tools`.
    tools: tuple[Mapping[str, Any], ...] = field(default=(), converter=_tuple)
    template_options: Mapping[str, Any] = field(factory=dict)  # the row's own arguments of the chat template
    source: str = ""  # name of the source, if several are mixed


@frozen(kw_only=True)
class Share:
    """One source's share of the training prompts."""

    name: str
    weight: float  # relative to the other shares
    train: IntArray  # [n] indices


class PromptSource(ABC):
    """Numbered prompts. The seed alone decides which are held out; those are never trained on."""

    train: IntArray  # [n] indices
    held_out: IntArray  # [h] indices
    chat: bool = False  # whether prompts are messages, for which the tokenizer needs a chat template
    unanswered: int = 0  # prompts without an answer
    first_unanswered: int = 0  # index of the first of them, if there is one
    notices: tuple[str, ...] = ()  # lines that tell a user what is not read, or not shown to the model
    left_out: frozenset[int] = frozenset()  # indices that are neither trained on nor evaluated
    characters: int | None = (
        None  # of the longest prompt, if all are ASCII texts and it is known without a look at each
    )

    @abstractmethod
    def prompt(self, index: int) -> Prompt: ...

    def where(self, index: int) -> str:
        """Where the prompt stands, for messages, such as its file and line."""
        return f"prompt {index}"

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)

    @property
    def shares(self) -> tuple[Share, ...]:
        """The sources that are mixed; an unmixed source is the only share."""
        return (Share(name="", weight=1.0, train=self.train),)

    def held_out_prompts(self) -> list[Prompt]:
        """Held-out prompts in an order fixed by the seed, so that the first few are a fair sample."""
        return [self.prompt(index) for index in self.held_out.tolist() if index not in self.left_out]

    def leave_out(self, indices: frozenset[int]) -> None:
        """Skip these prompts too from now on. Raises DataError if a share has no other to train on."""
        indices = self.left_out | indices
        for share in self.shares:
            if indices.issuperset(share.train.tolist()):
                of = f" of source {share.name!r}" if share.name else ""
                raise DataError(f"all {len(share.train)} training prompts{of} are skipped")
        self.left_out = indices


def split(size: int, *, held_out: int, seed: int, name: str) -> tuple[IntArray, IntArray]:
    """Split the indices below `size` into (train, held out). Raises DataError if nothing is left to train on."""
    if held_out >= size:
        raise DataError(
            f"data.held_out={held_out} leaves nothing to train on: {name} has {size} prompts; hold out fewer"
        )
    order = np.random.default_rng([seed, 0]).permutation(size)
    return np.sort(order[held_out:]), order[:held_out]


class SortDigits(PromptSource):
    """Sort five digits: prompt `35018>`, answer `01358`; all 100,000 numbers. Random weights can learn it."""

    characters = len("35018>")

    def __init__(self, *, held_out: int, seed: int) -> None:
        self.train, self.held_out = split(10**5, held_out=held_out, seed=seed, name="sort-digits")

    def prompt(self, index: int) -> Prompt:
        digits = f"{index:05d}"
        return Prompt(index=index, text=f"{digits}>", answer="".join(sorted(digits)))


class _Epochs:
    """An endless stream of one share's indices: every epoch goes through all of them in a new order, and skips those
    that are left out."""

    def __init__(self, train: IntArray, seed: int, left_out: frozenset[int]) -> None:
        self._train = train
        self._seed = seed
        self._left_out = left_out
        self.start(epoch=0, offset=0, passed_over=0)

    def start(self, *, epoch: int, offset: int, passed_over: int) -> None:
        self.epoch, self.offset, self.passed_over = epoch, offset, passed_over
        self._order = np.random.default_rng([self._seed, 1, epoch]).permutation(self._train)

    @property
    def taken(self) -> int:
        return self.epoch * len(self._order) + self.offset - self.passed_over

    def take(self) -> int:
        while True:
            if self.offset == len(self._order):
                self.start(epoch=self.epoch + 1, offset=0, passed_over=self.passed_over)
            index = int(self._order[self.offset])
            self.offset += 1
            if index not in self._left_out:
                return index
            self.passed_over += 1


class PromptStream:
    """An endless stream of training prompts, in an order fixed by `seed`.

    If sources are mixed, each prompt comes from the source that lags furthest behind its share of the prompts so far.
    So every batch has the requested mix: no source is ever a full prompt ahead of its share.
    """

    def __init__(self, source: PromptSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._shares = source.shares
        self._epochs = [_Epochs(share.train, seed, source.left_out) for share in self._shares]
        weights = [Fraction(share.weight) for share in self._shares]  # exact, so that every machine sees the same ties
        self._parts = [weight / sum(weights) for weight in weights]
        self._returned: deque[int] = deque()  # indices

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, returned prompts first; if an epoch ends, continue with the next."""
        return [self._source.prompt(self._take()) for _ in range(n)]

    def give_back(self, prompt: Prompt) -> None:
        """Return a prompt that was taken, to be drawn again."""
        self._returned.append(prompt.index)

    def _take(self) -> int:
        return self._returned.popleft() if self._returned else self._epochs[self._next()].take()

    def _next(self) -> int:
        """The share that the next prompt comes from; the first one on a tie."""
        if len(self._parts) == 1:
            return 0
        taken = [epochs.taken for epochs in self._epochs]
        lag = [part * (sum(taken) + 1) - n for part, n in zip(self._parts, taken, strict=True)]
        return lag.index(max(lag))

    @property
    def position(self) -> dict[str, Any]:
        """The stream's position, as plain data for a checkpoint."""
        stands = [
            {
                "epoch": epochs.epoch,
                "offset": epochs.offset,
                "prompts": len(share.train),
                **({"passed_over": epochs.passed_over} if epochs.passed_over else {}),
            }
            for epochs, share in zip(self._epochs, self._shares, strict=True)
        ]
        returned = {"returned": list(self._returned)} if self._returned else {}
        if len(self._shares) == 1:
            return {**stands[0], "seed": self._seed, **returned}
        sources = [
            {"name": share.name, "weight": share.weight, **stand}
            for share, stand in zip(self._shares, stands, strict=True)
        ]
        return {"sources": sources, "seed": self._seed, **returned}

    def position_without(self, prompts: Iterable[Prompt]) -> dict[str, Any]:
        """What `position` would be if these prompts were given back first."""
        position = self.position
        indices = [*(prompt.index for prompt in prompts), *position.get("returned", [])]
        return {**position, "returned": indices} if indices else position

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continue from `position`. CheckpointError if data, mix or seed differ from the checkpoint's."""
        held, now = _facts(position), _facts(self.position)
        for name, value in now.items():
            if held.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's data position has {name}={held.get(name)}, but this run has {name}={value}; "
                    f"resume with the same [data] and run.seed, or start a new run from the exported model"
                )
        for epochs, stand in zip(self._epochs, _stands(position), strict=True):
            epochs.start(epoch=stand["epoch"], offset=stand["offset"], passed_over=stand.get("passed_over", 0))
        returned = position.get("returned", [])
        if wrong := [index for index in returned if not (self._source.train == index).any()]:
            raise CheckpointError(
                f"the checkpoint's data position has returned prompt {short_repr(wrong[0])}, which is not one of this "
                "run's training prompts; resume from another checkpoint"
            )
        left_out = self._source.left_out  # which may have grown since
        self._returned = deque(index for index in returned if index not in left_out)


def _stands(position: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return position.get("sources", [position])


def _facts(position: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a position that must be equal in the run that resumes from it."""
    facts = {"prompts": position.get("prompts"), "seed": position.get("seed")}
    if "sources" in position:
        words = (f"{each['name']} ({each['prompts']} prompts, weight {each['weight']:g})" for each in _stands(position))
        facts["prompts"] = ", ".join(words)
    return facts
