"""Prompts to sample from: a generated task or a jsonl file, split once into prompts to train on and held-out ones."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from corerl.errors import CheckpointError, ConfigError, DataError
from corerl.types import IntArray


@frozen(kw_only=True)
class Prompt:
    index: int  # in its source; the same prompt has the same index in every run
    text: str
    answer: str  # "" where the data has none
    fields: Mapping[str, Any] = field(factory=dict)  # the whole row, for reward functions


class PromptSource(ABC):
    """Numbered prompts. Which of them are held out follows from `seed` alone, and they are never trained on."""

    train: IntArray  # [n] indices
    held_out: IntArray  # [h] indices

    def __init__(self, *, size: int, held_out: int, seed: int, name: str) -> None:
        if held_out >= size:
            raise DataError(
                f"data.held_out={held_out} leaves nothing to train on: {name} has {size} prompts; hold out fewer"
            )
        order = np.random.default_rng([seed, 0]).permutation(size)
        self.held_out = order[:held_out]
        self.train = np.sort(order[held_out:])

    @abstractmethod
    def prompt(self, index: int) -> Prompt: ...

    def held_out_prompts(self) -> list[Prompt]:
        """In an order that is the same in every run of this seed, so that the first few are a fair sample."""
        return [self.prompt(index) for index in self.held_out.tolist()]


class SortDigits(PromptSource):
    """Sort five digits: prompt `35018>`, answer `01358`; all 100,000 numbers. Learns from random weights."""

    def __init__(self, *, held_out: int, seed: int) -> None:
        super().__init__(size=10**5, held_out=held_out, seed=seed, name="sort-digits")

    def prompt(self, index: int) -> Prompt:
        digits = f"{index:05d}"
        return Prompt(index=index, text=f"{digits}>", answer="".join(sorted(digits)))


class JsonlPrompts(PromptSource):
    """One JSON object a line. All lines are checked at once, then only their byte offsets are kept.

    An answer that is no string (a number, a list) becomes its JSON text; blank lines are passed over.
    Raises DataError, with file and line, for the first line that cannot be used.
    """

    def __init__(self, path: str | Path, *, prompt_key: str, answer_key: str, held_out: int, seed: int) -> None:
        self._path = Path(path)
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        offsets: list[int] = []
        at = 0
        try:
            with self._path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        self._parse(line, index=len(offsets), where=f"{self._path}:{number}")
                        offsets.append(at)
                    at += len(line)
        except OSError as error:
            raise DataError(
                f"data.source: cannot read {self._path}: {error.strerror}; give a path to a .jsonl file"
            ) from error
        if not offsets:
            raise DataError(f"data.source: {self._path} is empty; it must hold one JSON object a line")
        self._offsets = np.array(offsets, dtype=np.int64)
        super().__init__(size=len(offsets), held_out=held_out, seed=seed, name=str(self._path))

    def prompt(self, index: int) -> Prompt:
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[index])
            return self._parse(lines.readline(), index=index, where=f"{self._path}, prompt {index}")

    def _parse(self, line: bytes, *, index: int, where: str) -> Prompt:
        try:
            row = json.loads(line)
        except ValueError as error:  # broken JSON or broken UTF-8
            raise DataError(f"{where}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: got {_kind(row)}, wanted a JSON object with the field {self._prompt_key!r}")
        if self._prompt_key not in row:
            near = get_close_matches(self._prompt_key, row, n=1)
            raise DataError(
                f"{where}: no field {self._prompt_key!r}; it has: {', '.join(row) or 'none'}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + " Set data.prompt_key"
            )
        text = row[self._prompt_key]
        if not isinstance(text, str) or not text:
            raise DataError(f"{where}: field {self._prompt_key!r} is {_kind(text)}, wanted a text that is not empty")
        answer = row.get(self._answer_key)
        if answer is None:
            answer = ""
        return Prompt(
            index=index, text=text, answer=answer if isinstance(answer, str) else json.dumps(answer), fields=row
        )


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    match value:
        case "":
            return "an empty text"
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case _:
            return "an object"


class PromptStream:
    """Training prompts without end: every epoch goes through all of them in an order of its own, given by `seed`."""

    def __init__(self, source: PromptSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._start(epoch=0, offset=0)

    def _start(self, *, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        self._order = np.random.default_rng([self._seed, 1, epoch]).permutation(self._source.train)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; an epoch that ends within them is followed by the next one."""
        indices: list[int] = []
        while len(indices) < n:
            if self._offset == len(self._order):
                self._start(epoch=self._epoch + 1, offset=0)
            found = self._order[self._offset : self._offset + n - len(indices)].tolist()
            indices += found
            self._offset += len(found)
        return [self._source.prompt(index) for index in indices]

    @property
    def position(self) -> dict[str, int]:
        """Where the stream stands, as plain data for a checkpoint."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "prompts": len(self._source.train),
            "seed": self._seed,
        }

    def restore(self, position: Mapping[str, int]) -> None:
        """Continue where `position` was taken. CheckpointError where data or seed are not those of the checkpoint."""
        for name, now in (("prompts", len(self._source.train)), ("seed", self._seed)):
            if position.get(name) != now:
                raise CheckpointError(
                    f"the checkpoint's data position has {name}={position.get(name)}, this run has {name}={now}; "
                    f"resume with the same [data] and run.seed, or start a new run from its export"
                )
        self._start(epoch=position["epoch"], offset=position["offset"])


def load_prompts(*, source: str, prompt_key: str, answer_key: str, held_out: int, seed: int) -> PromptSource:
    """The source that `[data]` names: `sort-digits`, or a path to a .jsonl file."""
    if source == "sort-digits":
        return SortDigits(held_out=held_out, seed=seed)
    if not source.endswith(".jsonl") and not Path(source).exists():
        near = "; did you mean 'sort-digits'?" if get_close_matches(source, ["sort-digits"]) else ""
        raise ConfigError(
            f"data.source: unknown source {source!r}; known: sort-digits, or a path to a .jsonl file{near}"
        )
    return JsonlPrompts(source, prompt_key=prompt_key, answer_key=answer_key, held_out=held_out, seed=seed)
