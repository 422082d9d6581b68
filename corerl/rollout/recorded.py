"""Rollout batches on disk, one file per step: written by a run that samples, read by one that trains."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, evolve

from corerl.data.prompts import Prompt
from corerl.errors import CheckpointError, DataError
from corerl.pictures import Picture, read
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Source
from corerl.types import Array, SampleBatch

ROLLOUTS = "rollouts"  # subdirectory of a run directory
PICTURES = "pictures/"  # by their digests
NAME = re.compile(r"step-(\d{8})\.npz")


def file_of(directory: Path, step: int) -> Path:
    """The path of rollout step `step`."""
    return directory / f"step-{step:08d}.npz"


def write_rollout(directory: Path, scored: ScoredRollout) -> Path:
    """Write one .npz: the batch's arrays by name, all else (prompts, texts, ...) as JSON. Raises DataError."""
    rollout, batch = scored.rollout, scored.rollout.batch
    facts = {
        "step": scored.step,
        "temperature": batch.temperature,
        "exact_match": scored.exact_match,
        "prompts": [_plain(prompt) for prompt in rollout.prompts],
        "texts": rollout.texts,
        "failures": dict(scored.failures),
        "first_failure": scored.first_failure,
        "counts": dict(scored.counts),
        "parts": dict(scored.parts),
        "pictures": [picture.id for picture in batch.pictures],
    }
    arrays: dict[str, Array] = {
        "tokens": batch.tokens,
        "offsets": batch.offsets,
        "rewards": scored.rewards,
        **{f"columns/{name}": column for name, column in batch.columns.items()},
        **{f"rows/{name}": row for name, row in batch.row_columns.items()},
        **{f"values/{name}": value for name, value in scored.values.items()},
        **{f"{PICTURES}{picture.id}": picture.pixels for picture in _pictures(rollout)},
        "facts": np.frombuffer(json.dumps(facts, default=_short).encode(), dtype=np.uint8),
    }
    path = file_of(directory, scored.step)
    partial = path.with_suffix(".partial")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"cannot write the rollout batch {path}: {error}; earlier batches are intact") from error
    return path


def read_rollout(path: Path) -> ScoredRollout:
    """Read what `write_rollout` wrote. Raises DataError if the file is missing or damaged."""
    try:
        # numpy would leave a damaged file open.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays: dict[str, Array] = dict(file)
        facts = json.loads(arrays["facts"].tobytes())
        pictures = {name: Picture(pixels) for name, pixels in _under(PICTURES, arrays).items()}
        batch = SampleBatch(
            tokens=arrays["tokens"],
            offsets=arrays["offsets"],
            columns=_under("columns/", arrays),
            row_columns=_under("rows/", arrays),
            temperature=facts["temperature"],
            pictures=tuple(pictures[name] for name in facts.get("pictures", ())),
        )
        prompts = tuple(_prompt(prompt, pictures) for prompt in facts["prompts"])
        return ScoredRollout(
            step=facts["step"],
            rollout=Rollout(batch=batch, prompts=prompts, texts=facts["texts"]),
            rewards=arrays["rewards"],
            exact_match=facts["exact_match"],
            seconds={},
            failures=facts["failures"],
            first_failure=facts["first_failure"],
            counts=facts["counts"],
            parts={name: tuple(sums) for name, sums in facts["parts"].items()},
            values=_under("values/", arrays),
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read the rollout batch {path} ({error}); sample it again") from error


def _pictures(rollout: Rollout) -> list[Picture]:
    """Those of rows and those of prompts, of which rows may be gone."""
    every = [*rollout.batch.pictures, *(read(each) for prompt in rollout.prompts for each in prompt.pictures)]
    return list({picture.id: picture for picture in every}.values())


def _plain(prompt: Prompt) -> dict[str, Any]:
    plain = asdict(prompt, filter=lambda attribute, _: attribute.name != "pictures")
    return {**plain, "pictures": [each.id for each in prompt.pictures]} if prompt.pictures else plain


def _prompt(plain: Mapping[str, Any], pictures: Mapping[str, Picture]) -> Prompt:
    return Prompt(**{**plain, "pictures": tuple(pictures[name] for name in plain.get("pictures", ()))})


def _short(value: Any) -> str:
    """What JSON lacks; of bytes, such as those of a row's picture, only how many."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def _under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def saved_rollouts(directory: str | Path) -> list[Path]:
    """The rollout batches in `directory`, or in that run directory, in step order. Raises DataError if there are
    none."""
    path = Path(directory)
    path = path / ROLLOUTS if os.path.isdir(path / ROLLOUTS) else path
    found = sorted(file for file in path.iterdir() if NAME.fullmatch(file.name)) if os.path.isdir(path) else []
    if not found:
        raise DataError(
            f"rollout.saved: no rollout batches (step-00000000.npz, ...) in {str(directory)!r}; set it to the "
            "`rollouts` directory of a run with rollout.save=true or run.mode='rollout-only'"
        )
    return found


class SavedRollouts(Source):
    """Rollout steps read from files, in order, renumbered from 0."""

    def __init__(self, directory: str | Path, *, steps: int, vocab_size: int, pictures: bool = False) -> None:
        """`pictures`: the model is shown those of rows. Raises DataError if there are fewer than `steps` files."""
        self._files = saved_rollouts(directory)
        if len(self._files) < steps:
            raise DataError(
                f"run.steps: got {steps}, but the number of rollout batches in {str(directory)!r} is "
                f"{len(self._files)}; set run.steps to at most {len(self._files)}"
            )
        self._steps = steps
        self._vocab_size, self._pictures = vocab_size, pictures
        self._step = 0

    async def next(self) -> ScoredRollout | None:
        if self._step >= self._steps:
            return None
        path = self._files[self._step]
        scored = read_rollout(path)
        largest = int(scored.rollout.batch.tokens.max(initial=0))
        if largest >= self._vocab_size:
            raise DataError(
                f"{path} contains token {largest}, but the model's vocabulary has only {self._vocab_size} tokens; "
                "train the model that sampled this batch"
            )
        if scored.rollout.batch.pictures and not self._pictures:  # their placeholders would be trained on as text
            raise DataError(
                f"{path} has rows that show pictures, but model.pictures is not set; set it as in the run that sampled "
                "this batch"
            )
        self._step += 1
        return evolve(scored, step=self._step - 1)

    @property
    def position(self) -> dict[str, Any]:
        return {"rollout_step": self._step, "files": len(self._files)}

    def restore(self, position: Mapping[str, Any], checkpoint: Path | None = None) -> None:
        if position.get("files") != len(self._files):
            raise CheckpointError(
                f"the checkpoint was trained from {position.get('files', 'no')} saved rollout batches, but there are "
                f"now {len(self._files)}; resume with the same rollout.saved"
            )
        self._step = position["rollout_step"]
