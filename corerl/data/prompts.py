"""Prompts to sample from: split once into training and held-out prompts, and taken in an order fixed by the seed."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from xxhash import xxh3_64_hexdigest

from corerl.data.digests import packed
from corerl.errors import CheckpointError, DataError
from corerl.pictures import FoundPicture, Picture
from corerl.types import IntArray, UIntArray, offsets_of


@frozen(kw_only=True)
class Prompt:
    """One row of the data, as what is asked of the model."""

    index: int  # in its source; the same prompt has the same index in every run
    text: str  # for a chat: its only message, or all messages as lines `role: content`
    answer: str  # "" if the data has none
    fields: Mapping[str, Any] = field(factory=dict)  # the whole row, for reward functions
    # The chat; () continues the text. Prompts are saved as JSON, which has only lists.
    messages: tuple[Mapping[str, Any], ...] = field(default=(), converter=tuple[Mapping[str, Any], ...])
    # What the chat template tells the model of, each as in OpenAI's `tools`.
    tools: tuple[Mapping[str, Any], ...] = field(default=(), converter=tuple[Mapping[str, Any], ...])
    template_options: Mapping[str, Any] = field(factory=dict)  # the row's own arguments of the chat template
    source: str = ""  # name of the source, if several are mixed
    # In the order of their marks, which are parts `{"type": "image"}` of messages; of a text, what the model's own
    # template would write. Each has an `id`, a `size` (W, H) and `pixels` [H, W, 3], RGB.
    pictures: tuple[Picture | FoundPicture, ...] = ()

    def as_chat(self, *, system: str) -> Prompt:
        """The prompt as a chat: a text becomes a user message and stays in `.text`. `system` begins it, unless it
        begins with a system message."""
        messages = self.messages or ({"role": "user", "content": self.text},)
        if system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        return evolve(self, messages=messages)


@frozen(kw_only=True, eq=False)
class MixtureComponent:
    """One source of a mixture: which of its rows are trained on and which are held out. Its n rows have the indices
    from `first` on."""

    name: str = ""
    weight: float = 1.0  # relative to the other components
    first: int = 0
    digests: UIntArray  # [n] of the rows; equal rows have equal ones
    order: IntArray  # [n] rows, counted from 0, in the order in which they are held out
    train: IntArray  # [t] indices, in the order that epochs permute
    held_out: IntArray  # [h] indices
    added: tuple[tuple[int, int], ...] = ()  # epoch, k: of the last rows of `train`, k were added in that epoch

    def digests_of(self, indices: IntArray) -> UIntArray:
        return self.digests[indices - self.first]

    def epoch(self, epoch: int, seed: int) -> IntArray:
        """The training indices in the order of an epoch: rows added in it come last, in later ones among the others."""
        rng = np.random.default_rng([seed, 1, epoch])
        end = len(self.train) - sum(k for at, k in self.added if at >= epoch)
        parts = [rng.permutation(self.train[:end])]
        for k in (k for at, k in self.added if at == epoch):
            parts.append(rng.permutation(self.train[end : end + k]))
            end += k
        return np.concatenate(parts)


class PromptSource(ABC):
    """Numbered prompts. Rows and seed decide which are held out, not the rows' places; those are never trained on, and
    no copies of them."""

    train: IntArray  # [n] indices
    held_out: IntArray  # [h] indices
    components: tuple[MixtureComponent, ...]  # one for each source; an unmixed source is the only one
    asked: UIntArray  # digests of the prompts' texts, by index: different rows may ask the same
    continues: str = ""  # identity of data whose positions are valid here too
    replaces: str = ""  # identity of data from whose positions these begin at their first prompt
    chat: bool = False  # whether prompts are messages, for which the tokenizer needs a chat template
    notices: tuple[str, ...] = ()  # lines for the user

    @abstractmethod
    def prompt(self, index: int) -> Prompt: ...

    @cached_property
    def left_out(self) -> set[int]:
        """Indices that are neither trained on nor evaluated."""
        return set()

    @cached_property
    def checked(self) -> dict[int, Prompt]:
        """Training prompts that have passed a run's check already, by index, until they are taken: their pictures are
        decoded."""
        return {}

    def where(self, index: int) -> str:
        """The prompt's place for messages: its file and line, say."""
        return f"prompt {index}"

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)

    def divide(self, components: Sequence[MixtureComponent]) -> None:
        """Take the prompts as these components have them, but for copies of held-out rows, unless a component has no
        others. All hold out as many prompts, which alternate between the components."""
        held_out = np.concatenate([component.digests_of(component.held_out) for component in components])
        copies = [np.isin(component.digests_of(component.train), held_out) for component in components]
        self.components = tuple(
            component if copied.all() else evolve(component, train=component.train[~copied])
            for component, copied in zip(components, copies, strict=True)
        )
        self.train = np.concatenate([component.train for component in self.components])
        self.held_out = np.stack([component.held_out for component in self.components], axis=1).ravel()
        self.__dict__.pop("record", None)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The rows that are trained on and those that are held out, as plain data for a checkpoint."""
        sources = [
            {
                "name": component.name,
                "weight": component.weight,
                "rows": packed(component.digests_of(component.train)),
                "held_out": packed(component.digests_of(component.held_out)),
                "added": [{"epoch": epoch, "rows": k} for epoch, k in component.added],
            }
            for component in self.components
        ]
        return {"sources": sources, "identity": xxh3_64_hexdigest(json.dumps(sources).encode())}

    @property
    def copies(self) -> int:
        """How many rows are neither trained on nor held out, because they are copies of held-out ones."""
        return sum(len(component.digests) for component in self.components) - len(self)

    def held_out_prompts(self) -> list[Prompt]:
        """Held-out prompts in an order fixed by the seed, so that the first few are a fair sample."""
        return [self.prompt(index) for index in self.held_out.tolist() if index not in self.left_out]

    def leave_out(self, indices: Set[int]) -> None:
        """Skip these prompts too from now on. Raises DataError if a component has no other to train on."""
        together = self.left_out | indices
        for component in self.components:
            if together.issuperset(component.train.tolist()):
                raise _all_skipped(component)
        self.left_out.update(indices)


def _all_skipped(component: MixtureComponent) -> DataError:
    of = f" of source {component.name!r}" if component.name else ""
    return DataError(f"all {len(component.train)} training prompts{of} are skipped")


def split(digests: UIntArray, order: IntArray, *, held_out: int, name: str) -> MixtureComponent:
    """Hold out the first rows of an order, copies last. Raises DataError if nothing is left to train on."""
    if held_out >= len(digests):
        raise DataError(
            f"data.held_out={held_out} leaves nothing to train on: {name} has {len(digests)} prompts; hold out "
            f"fewer, such as {len(digests) // 10}"
        )
    _, first = np.unique(digests[order], return_index=True)
    copy = np.ones(len(order), dtype=np.bool_)
    copy[first] = False
    held = order[np.argsort(copy, kind="stable")[:held_out]]
    train = np.setdiff1d(np.arange(len(digests)), held, assume_unique=True)
    return MixtureComponent(digests=digests, order=order, train=train, held_out=held)


class SortDigits(PromptSource):
    """Sort five digits: prompt `35018>`, answer `01358`; all 100,000 numbers. Random weights can learn it."""

    def __init__(self, *, held_out: int, seed: int, chat: bool = False, system: str = "") -> None:
        self.chat, self._system = chat, system
        order = np.random.default_rng([seed, 0]).permutation(10**5)
        self.asked = np.arange(10**5, dtype=np.uint64)
        self.divide([split(self.asked, order, held_out=held_out, name="sort-digits")])

    def prompt(self, index: int) -> Prompt:
        digits = f"{index:05d}"
        prompt = Prompt(index=index, text=f"{digits}>", answer="".join(sorted(digits)))
        return prompt.as_chat(system=self._system) if self.chat else prompt


class MixedPrompts(PromptSource):
    """The prompts of several sources, numbered one source after the other. Each source keeps its own split.

    All sources hold out the same number; held-out prompts alternate between the sources.
    """

    def __init__(self, sources: Mapping[str, PromptSource], weights: Mapping[str, float]) -> None:
        self._names = tuple(sources)
        self._sources = tuple(sources.values())
        (components,) = zip(*(source.components for source in self._sources), strict=True)  # each is unmixed
        self._starts = offsets_of([len(component.digests) for component in components])[:-1]
        self.asked = np.concatenate([source.asked for source in self._sources])
        self.chat = any(source.chat for source in self._sources)
        self.notices = tuple(notice for source in self._sources for notice in source.notices)
        self.divide(
            [
                evolve(
                    component,
                    name=name,
                    weight=weights[name],
                    first=int(start),
                    train=component.train + start,
                    held_out=component.held_out + start,
                )
                for name, component, start in zip(self._names, components, self._starts, strict=True)
            ]
        )

    def prompt(self, index: int) -> Prompt:
        at, own = self._place(index)
        return evolve(self._sources[at].prompt(own), index=index, source=self._names[at])

    def where(self, index: int) -> str:
        at, own = self._place(index)
        return self._sources[at].where(own)

    def _place(self, index: int) -> tuple[int, int]:
        """The source that a prompt comes from, and its index there."""
        at = int(np.searchsorted(self._starts, index, side="right")) - 1
        return at, index - int(self._starts[at])


class HeldOut(PromptSource):
    """These prompts of a source. It leaves out what the source does, and may leave out more."""

    def __init__(self, source: PromptSource, indices: IntArray) -> None:
        self._source, self.chat = source, source.chat
        self.components, self.asked, self.notices = source.components, source.asked, source.notices
        self.train, self.held_out = np.zeros(0, np.int64), indices

    def prompt(self, index: int) -> Prompt:
        return self._source.prompt(index)

    def where(self, index: int) -> str:
        return self._source.where(index)

    def held_out_prompts(self) -> list[Prompt]:
        return [each for each in super().held_out_prompts() if each.index not in self._source.left_out]

    def leave_out(self, indices: Set[int]) -> None:
        self.left_out.update(indices)
        if self.left_out.issuperset(self.held_out.tolist()):
            raise DataError(f"all {len(self)} prompts are skipped")


class _Epochs:
    """An endless stream of one component's prompts: every epoch goes through all of them in a new order."""

    def __init__(self, component: MixtureComponent, seed: int) -> None:
        self._component = component
        self._seed = seed
        self.start(epoch=0, offset=0, taken=0)

    def start(self, *, epoch: int, offset: int, taken: int) -> None:
        self.epoch, self.offset, self.taken = epoch, offset, taken
        self._order = self._component.epoch(epoch, self._seed)

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "offset": self.offset, "taken": self.taken}

    def take(self, prompt: Callable[[int], Prompt | None]) -> Prompt:
        """The next prompt, without those that are None. Raises DataError if all of an epoch are."""
        for _ in range(2 * len(self._order)):  # what is left of this epoch, and the next one
            if self.offset == len(self._order):
                self.start(epoch=self.epoch + 1, offset=0, taken=self.taken)
            found = prompt(int(self._order[self.offset]))
            self.offset += 1
            if found is not None:
                self.taken += 1
                return found
        raise _all_skipped(self._component)


class PromptStream:
    """An endless stream of training prompts, in an order fixed by `seed`.

    If sources are mixed, each prompt comes from the source that lags furthest behind its share of the prompts so far.
    So every batch has the requested mix: no source is ever a full prompt ahead of its share.
    """

    def __init__(
        self,
        source: PromptSource,
        seed: int,
        *,
        check: Callable[[Prompt], str] | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """`check` says why a prompt is skipped, "" if it is not, or raises DataError. `notify` gets a line about the
        first that is skipped, the 10th, the 100th ..."""
        self._source = source
        self._seed = seed
        self._check, self._notify = check, notify
        self._components = source.components
        self._epochs = [_Epochs(component, seed) for component in self._components]
        weights = [Fraction(each.weight) for each in self._components]  # exact: every machine sees the same ties
        self._parts = [weight / sum(weights) for weight in weights]
        self._returned: deque[int] = deque()  # indices

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, returned prompts first; if an epoch ends, continue with the next. Raises DataError for a
        prompt that the check refuses."""
        return [self._take() for _ in range(n)]

    def give_back(self, prompt: Prompt) -> None:
        """Return a prompt that was taken, to be taken again."""
        self._returned.append(prompt.index)

    def _take(self) -> Prompt:
        while self._returned:
            if (found := self._usable(self._returned.popleft())) is not None:
                return found
        return self._epochs[self._next()].take(self._usable)

    def _usable(self, index: int) -> Prompt | None:
        """The prompt, unless it is skipped."""
        if index in self._source.left_out:
            return None
        if (checked := self._source.checked.pop(index, None)) is not None:
            return checked
        prompt = self._source.prompt(index)
        try:
            why = self._check(prompt) if self._check is not None else ""
        except DataError as error:
            raise DataError(f"{self._source.where(index)}: {error.message}") from error
        if not why:
            return prompt
        self._source.left_out.add(index)
        count = len(self._source.left_out)
        if self._notify is not None and str(count).strip("0") == "1":
            self._notify(f"data: {count} prompts are skipped so far; the last: {self._source.where(index)}: {why}")
        return None

    def _next(self) -> int:
        """The component that the next prompt comes from; the first one on a tie."""
        if len(self._parts) == 1:
            return 0
        taken = [epochs.taken for epochs in self._epochs]
        lag = [part * (sum(taken) + 1) - n for part, n in zip(self._parts, taken, strict=True)]
        return lag.index(max(lag))

    @property
    def position(self) -> dict[str, Any]:
        """The stream's position, as plain data for a checkpoint."""
        position = {"data": self._source.record["identity"], "seed": self._seed}
        return {**position, "sources": [epochs.position for epochs in self._epochs], **self._given_back(self._returned)}

    def position_without(self, prompts: Iterable[Prompt]) -> dict[str, Any]:
        """What `position` would be if these prompts were given back first."""
        return {**self.position, **self._given_back([*(prompt.index for prompt in prompts), *self._returned])}

    def _given_back(self, indices: Sequence[int]) -> dict[str, Any]:
        """The components and digests of returned prompts: the file may have another order when the run is resumed, and
        another component may have an equal row."""
        returned = []
        for index in indices:
            at = max(at for at, each in enumerate(self._components) if each.first <= index)
            component = self._components[at]
            returned.append([at, int(component.digests[index - component.first])])
        return {"returned": returned} if returned else {}

    def restore(self, position: Mapping[str, Any]) -> bool:
        """Continue from `position`; False if these prompts replace those of the position, and begin with the first.
        Raises CheckpointError for the position of another seed or in other data."""
        positions, data = position["sources"], position["data"]
        self._source.checked.clear()  # these prompts would be the first of a new run
        self._returned = deque()
        if data == self._source.replaces:
            epoch = 1 + max(each["epoch"] for each in positions)  # an order of its own
            for epochs in self._epochs:
                epochs.start(epoch=epoch, offset=0, taken=0)
            return False
        other_seed = position["seed"] != self._seed
        if other_seed or data not in (self._source.record["identity"], self._source.continues):
            name = "seed" if other_seed else "data"
            raise CheckpointError(
                f"the checkpoint's data position has {name}={position[name]}, but this run has "
                f"{name}={self.position[name]}; resume with the same [data] and run.seed"
            )
        for epochs, saved in zip(self._epochs, positions, strict=True):
            epochs.start(epoch=saved["epoch"], offset=saved["offset"], taken=saved["taken"])
        for at, digest in position.get("returned", []):
            component = self._components[at]
            indices = component.train[component.digests_of(component.train) == digest].tolist()
            if indices and indices[0] not in self._source.left_out:  # which may have grown since
                self._returned.append(indices[0])
        return True
