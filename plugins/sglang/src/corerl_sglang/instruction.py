"""Exchange small files between the engine and its server's ranks: take a weight update, or report what you hold.

    asked-7f3a.pickle        from the engine: which update, from where; or a question
    asked-7f3a.rank-0.json   rank 0's answer

SGLang passes only names and tensors to a rank's loader, and returns nothing, so a name says where the instruction is.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from corerl.weights import Address, Manifest
from corerl_sglang.held import Region, Sum


@frozen(kw_only=True)
class Instruction:
    """Tells all ranks of a replica to take an update."""

    manifest: Manifest
    version: int
    address: Address
    receivers: tuple[int, ...]  # each rank's receiver index
    adapters: str = ""  # file that the first rank is to write the adapters to, if there are any


@frozen(kw_only=True)
class Question:
    """Asks all ranks of a replica what they hold."""


@frozen(kw_only=True)
class Answer:
    """One rank's answer."""

    bytes: int  # received
    error: str  # "" if its part of the model holds the new weights
    sums: Mapping[str, Sequence[Sum]] = field(factory=dict)  # in answer to a Question: by tensor, of the parts it holds


def write_instruction(directory: Path, asked: Instruction | Question) -> Path:
    """Write the instruction to `directory`, which nobody but the engine may write to, since its files are unpickled."""
    path = directory / f"asked-{uuid.uuid4().hex}.pickle"
    path.write_bytes(pickle.dumps(asked))
    return path


def name_for(path: Path, rank: int) -> str:
    """The string to pass as a tensor's name."""
    return json.dumps({"instruction": str(path), "rank": rank})


def read_instruction(name: str) -> tuple[Instruction | Question, Path, int]:
    """The instruction, its path, and the rank it is for."""
    data = json.loads(name)
    path = Path(data["instruction"])
    asked: Instruction | Question = pickle.loads(path.read_bytes())
    return asked, path, int(data["rank"])


def write_answer(path: Path, rank: int, answer: Answer) -> None:
    partial = path.with_suffix(f".rank-{rank}.partial")
    partial.write_text(json.dumps(asdict(answer)))
    os.replace(partial, _answer(path, rank))


def read_answers(path: Path, ranks: int) -> list[Answer | None]:
    """Each rank's answer, None if it gave none. Removes the answers and the instruction."""
    answers: list[Answer | None] = []
    for rank in range(ranks):
        file = _answer(path, rank)
        answers.append(_read(json.loads(file.read_text())) if file.exists() else None)
        file.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return answers


def _read(data: Mapping[str, Any]) -> Answer:
    def part(source: Mapping[str, Any], bits: int) -> Sum:
        return Sum(Region(source["offset"], tuple(source["shape"]), tuple(source["strides"])), bits)

    sums = {name: [part(**each) for each in parts] for name, parts in data["sums"].items()}
    return Answer(bytes=data["bytes"], error=data["error"], sums=sums)


def _answer(path: Path, rank: int) -> Path:
    return path.with_suffix(f".rank-{rank}.json")
