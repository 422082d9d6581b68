"""Checkpoints on disk: each a directory with what the ranks wrote, and a JSON file of what clients are told of it.

DIRECTORY/RUN/run.json                          the model: what clients are told of it
DIRECTORY/RUN/config.toml                       what ranks were started with, for exports
DIRECTORY/RUN/weights/NAME/checkpoint.json      written last
DIRECTORY/RUN/weights/NAME/state/               as `TrainGroup.save` writes it
DIRECTORY/RUN/sampler_weights/NAME/...          the same of a checkpoint that is to be sampled from
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from tinker.types import Checkpoint, TrainingRun

from corerl.messages import short_repr
from corerl_tinker.requests import Refused

KINDS: Mapping[str, Literal["training", "sampler"]] = {"weights": "training", "sampler_weights": "sampler"}
NAME = r"[\w-][\w.-]{0,127}"
PATH = re.compile(rf"tinker://[\w:-][\w.:-]{{0,127}}/({'|'.join(KINDS)})/{NAME}", re.ASCII)
CHECKPOINT, RUN, CONFIG, STATE = "checkpoint.json", "run.json", "config.toml", "state"
PARTIAL, REPLACED = ".partial", ".replaced"  # beginnings of the names of directories that hold no checkpoint
LONGEST_TTL = 10**9  # seconds
Metadata = Mapping[str, str] | None


class Checkpoints:
    """The checkpoints in a directory, of this server and earlier ones. All methods may be called by any thread."""

    def __init__(self, directory: Path, config: str) -> None:
        """`config`, as TOML, is what ranks were started with."""
        self._directory, self._config = directory, config
        self._changing = threading.RLock()

    def begin(self, run: TrainingRun) -> None:
        """Remember a model, under whose id its checkpoints will be."""
        place = self._directory / run.training_run_id
        place.mkdir(parents=True, exist_ok=True)
        _write(place / RUN, run)
        (place / CONFIG).write_text(self._config)

    def save(
        self, path: str, write: Callable[[Path], int], *, ttl: object, overwrite: bool, user_metadata: Metadata
    ) -> Checkpoint:
        """Publish what `write` puts into a directory; it returns the bytes. What has expired goes first, of all models.
        Raises Refused if there is a checkpoint of that path, unless `overwrite`."""
        place, now = self._place(path), _now()
        expires = _expiry(ttl, now)
        if not overwrite and self._read(place) is not None:
            raise Refused(f"{path} exists; give the checkpoint another name, or say overwrite=True")
        for run in self._directory.iterdir():
            self._checkpoints(run)
        partial = place.with_name(PARTIAL + place.name)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            saved = Checkpoint(
                checkpoint_id=f"{place.parent.name}/{place.name}",
                checkpoint_type=KINDS[place.parent.name],
                time=now,
                tinker_path=path,
                size_bytes=write(partial / STATE),
                user_metadata=dict(user_metadata or {}),
                expires_at=expires,
            )
            _write(partial / CHECKPOINT, saved)
            with self._changing:
                _replace(place, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return saved

    def find(self, path: str) -> tuple[TrainingRun, Checkpoint]:
        """A checkpoint, and the model that it is of. Raises Refused, with status 404, if there is none."""
        place = self._place(path)
        saved = self._read(place)
        run = self.run(place.parent.parent.name)
        if saved is None:
            raise Refused(
                f"there is no checkpoint {path!r}; it was never saved here, was deleted, or expired", status=404
            )
        return run, saved

    def state_of(self, path: str) -> Path:
        """What ranks go on from. Raises Refused as `find` does."""
        self.find(path)
        return (self._place(path) / STATE).absolute()

    def run(self, name: str) -> TrainingRun:
        """Raises Refused, with status 404, if there is none."""
        try:
            if not PATH.fullmatch(f"tinker://{name}/weights/x"):
                raise ValueError("a path that leads elsewhere")
            run = TrainingRun.model_validate_json((self._directory / name / RUN).read_text())
        except (OSError, ValueError) as error:  # none of ours
            raise Refused(
                f"training run {short_repr(name, 200)} has no checkpoint here, and is not trained now", status=404
            ) from error
        latest = {saved.checkpoint_type: saved for saved in self._checkpoints(self._directory / name)}
        return run.model_copy(
            update={
                "last_request_time": max([run.last_request_time, *(saved.time for saved in latest.values())]),
                "last_checkpoint": latest.get("training"),
                "last_sampler_checkpoint": latest.get("sampler"),
            }
        )

    def of(self, name: str) -> list[Checkpoint]:
        """A run's checkpoints, the oldest first. Raises Refused as `run` does."""
        return self._checkpoints(self._directory / self.run(name).training_run_id)

    def delete(self, path: str) -> None:
        """Raises Refused as `find` does."""
        with self._changing:
            self.find(path)
            _replace(self._place(path), None)

    def expire(self, path: str, *, ttl: object) -> None:
        """Delete a checkpoint `ttl` seconds from now; None: never. Raises Refused as `find` does."""
        with self._changing:
            _, saved = self.find(path)
            _write(self._place(path) / CHECKPOINT, saved.model_copy(update={"expires_at": _expiry(ttl, _now())}))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _place(self, path: str) -> Path:
        if not PATH.fullmatch(path):
            raise Refused(
                f"the path of a checkpoint is {short_repr(path, 200)}, wanted tinker://RUN/weights/NAME or "
                "tinker://RUN/sampler_weights/NAME, where NAME has 1 to 128 letters, digits, '_', '-' and '.', which "
                "is not the first"
            )
        return self._directory / path.removeprefix("tinker://")

    def _read(self, place: Path) -> Checkpoint | None:
        """The checkpoint of this directory; None if there is none. What has expired goes."""
        with self._changing:
            try:
                saved = Checkpoint.model_validate_json((place / CHECKPOINT).read_text())
            except (OSError, ValueError):
                return None  # also what is no longer readable, or of a later version
            if saved.expires_at is None or _now() < saved.expires_at:
                return saved
            _replace(place, None)
            return None

    def _checkpoints(self, run: Path) -> list[Checkpoint]:
        found = [self._read(place) for folder in KINDS for place in (run / folder).glob("[!.]*")]
        return sorted(filter(None, found), key=lambda saved: saved.time)


def _replace(place: Path, new: Path | None) -> None:
    """Let `new`, or nothing, be at this place. What was there goes out of sight at once, so that nobody sees half of
    it, and then slowly: a server that ends meanwhile leaves the new."""
    aside = place.with_name(REPLACED + place.name)
    shutil.rmtree(aside, ignore_errors=True)  # what an earlier server left
    if place.exists():
        os.replace(place, aside)
    if new is not None:
        os.replace(new, place)
    shutil.rmtree(aside, ignore_errors=True)


def _now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)


def _expiry(ttl: object, now: datetime) -> datetime | None:
    """When a checkpoint goes that is kept for so many seconds; None: never."""
    if ttl is None:
        return None
    if isinstance(ttl, int) and 0 < ttl <= LONGEST_TTL:
        return now + timedelta(seconds=ttl)
    raise Refused(f"ttl_seconds={short_repr(ttl, 40)}, wanted 1 to {LONGEST_TTL}, or null for ever")


def _write(path: Path, content: BaseModel) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(content.model_dump_json())
    os.replace(temporary, path)
