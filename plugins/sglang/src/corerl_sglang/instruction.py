"""What the engine tells each rank of its server to do for one weight update, and what the rank answers: small files.

    update-7f3a.pickle        the engine's: which update, from where
    update-7f3a.rank-0.json   rank 0's answer

SGLang hands a rank's loader names and tensors, and gives nothing back: so one name tells where the instruction is.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from pathlib import Path

from attrs import frozen

from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address


@frozen(kw_only=True)
class Instruction:
    """To all ranks of one replica."""

    manifest: Manifest
    version: int
    address: Address
    receivers: tuple[int, ...]  # the index of each rank's receiver


@frozen(kw_only=True)
class Answer:
    """Of one rank."""

    bytes: int  # that it received
    error: str  # "" where its part of the model holds the new weights


def write_instruction(directory: Path, instruction: Instruction) -> Path:
    """The directory is the engine's own, which nobody else may write to: what is read from it may be unpickled."""
    path = directory / f"update-{uuid.uuid4().hex}.pickle"
    path.write_bytes(pickle.dumps(instruction))
    return path


def name_for(path: Path, rank: int) -> str:
    """What stands in the place of a tensor's name."""
    return json.dumps({"instruction": str(path), "rank": rank})


def read_instruction(name: str) -> tuple[Instruction, Path, int]:
    """With its path, and the rank that it is for."""
    told = json.loads(name)
    path = Path(told["instruction"])
    instruction: Instruction = pickle.loads(path.read_bytes())
    return instruction, path, int(told["rank"])


def write_answer(path: Path, rank: int, answer: Answer) -> None:
    partial = path.with_suffix(f".rank-{rank}.partial")
    partial.write_text(json.dumps({"bytes": answer.bytes, "error": answer.error}))
    os.replace(partial, _answer(path, rank))


def read_answers(path: Path, ranks: int) -> list[Answer | None]:
    """Of each rank; None of one that gave none. Removes them, and the instruction."""
    answers: list[Answer | None] = []
    for rank in range(ranks):
        file = _answer(path, rank)
        answers.append(Answer(**json.loads(file.read_text())) if file.exists() else None)
        file.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return answers


def _answer(path: Path, rank: int) -> Path:
    return path.with_suffix(f".rank-{rank}.json")
