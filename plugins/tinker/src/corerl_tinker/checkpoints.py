"""Checkpoints on disk: each a directory with what the ranks wrote, and a JSON file that says what it is.

DIRECTORY/RUN/run.json                          the model: how clients know it, and their metadata
DIRECTORY/RUN/config.toml                       what ranks were started with, for exports
DIRECTORY/RUN/weights/NAME/checkpoint.json      written last
DIRECTORY/RUN/weights/NAME/state/               as `TrainGroup.save` writes it
DIRECTORY/RUN/sampler_weights/NAME/...          the same of a checkpoint that is to be sampled from
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, evolve

from corerl.messages import shorten
from corerl_tinker.requests import ModelMade, Refused, Run, Saved

Kind = Literal["training", "sampler"]
FOLDERS: Mapping[Kind, str] = {"training": "weights", "sampler": "sampler_weights"}
NAME = r"[\w-][\w.-]{0,127}"
PATH = re.compile(rf"tinker://[\w:-][\w.:-]{{0,127}}/(weights|sampler_weights)/{NAME}", re.ASCII)
CHECKPOINT, RUN, CONFIG, STATE = "checkpoint.json", "run.json", "config.toml", "state"
PARTIAL, REPLACED = ".partial", ".replaced"  # beginnings of the names of directories that hold no checkpoint


class Checkpoints:
    """The checkpoints in a directory, of this server and earlier ones. All methods may be called by any thread."""

    def __init__(self, directory: Path, config: str) -> None:
        """`config`, as TOML, is what ranks were started with."""
        self._directory, self._config = directory, config
        self._changing = threading.RLock()

    def begin(self, run: str, made: ModelMade, user_metadata: Mapping[str, str]) -> None:
        """Remember a model, under whose id its checkpoints will be."""
        place = self._directory / run
        place.mkdir(parents=True, exist_ok=True)
        _write(place / RUN, {"made": asdict(made), "user_metadata": dict(user_metadata)})
        (place / CONFIG).write_text(self._config)

    def save(
        self,
        path: str,
        write: Callable[[Path], int],
        *,
        ttl: float | None,
        overwrite: bool,
        user_metadata: Mapping[str, str],
    ) -> Saved:
        """Publish what `write` puts into a directory; it returns the bytes. Raises Refused if there is a checkpoint of
        that path, unless `overwrite`."""
        place, kind = self._place(path)
        if not overwrite and self._read(path) is not None:
            raise Refused(f"{path} exists; give the checkpoint another name, or say overwrite=True")
        partial = place.with_name(PARTIAL + place.name)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        size = write(partial / STATE)
        now = time.time()
        expires = None if ttl is None else now + ttl
        saved = Saved(path=path, kind=kind, bytes=size, created=now, expires=expires, user_metadata=dict(user_metadata))
        _write(partial / CHECKPOINT, asdict(saved))
        with self._changing:
            aside = _aside(place)
            if place.exists():
                os.replace(place, aside)
            os.replace(partial, place)
            (place.parent.parent / RUN).touch()
            shutil.rmtree(aside, ignore_errors=True)  # slow: a server that ends meanwhile leaves the new checkpoint
        return saved

    def get(self, path: str) -> Saved:
        """Raises Refused, with status 404, if there is none."""
        saved = self._read(path)
        if saved is None:
            raise Refused(
                f"there is no checkpoint {path}; it was never saved here, was deleted, or expired", status=404
            )
        return saved

    def state_of(self, path: str) -> Path:
        """What ranks go on from. Raises Refused as `get` does."""
        self.get(path)
        place, _ = self._place(path)
        return place / STATE

    def runs(self) -> list[Run]:
        """Every model that has a directory, those used last at the end."""
        places = [each for each in self._directory.iterdir() if each.is_dir()] if self._directory.is_dir() else []
        found = [run for each in places if (run := self._run(each)) is not None]
        return sorted(found, key=lambda run: run.used)

    def delete(self, path: str) -> None:
        """Raises Refused as `get` does."""
        with self._changing:
            self.get(path)
            self._remove(self._place(path)[0])

    def expire(self, path: str, *, ttl: float | None) -> None:
        """Raises Refused as `get` does."""
        with self._changing:
            saved = evolve(self.get(path), expires=None if ttl is None else time.time() + ttl)
            _write(self._place(path)[0] / CHECKPOINT, asdict(saved))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _place(self, path: str) -> tuple[Path, Kind]:
        _, _, run, folder, name = checked_path(path).split("/")
        kind: Kind = "training" if folder == FOLDERS["training"] else "sampler"
        return self._directory / run / folder / name, kind

    def _read(self, path: str) -> Saved | None:
        """What is at this path; None if nothing is. What has expired goes."""
        place, _ = self._place(path)
        with self._changing:
            try:
                saved = Saved(**json.loads((place / CHECKPOINT).read_text()))
            except (OSError, ValueError, TypeError):
                return None  # also what is no longer readable, or of a later version
            if saved.expires is None or time.time() < saved.expires:
                return saved
            self._remove(place)
            return None

    def _run(self, place: Path) -> Run | None:
        try:
            used = (place / RUN).stat().st_mtime
            content: dict[str, Any] = json.loads((place / RUN).read_text())
            made = ModelMade(**content["made"])
        except (OSError, ValueError, TypeError, KeyError):
            return None  # none of ours
        paths = [
            f"tinker://{place.name}/{folder}/{each.name}"
            for folder in FOLDERS.values()
            for each in (place / folder).glob("[!.]*")
        ]
        saved = [one for path in paths if PATH.fullmatch(path) and (one := self._read(path)) is not None]
        return Run(
            id=place.name,
            made=made,
            used=used,
            user_metadata=content.get("user_metadata", {}),
            checkpoints=tuple(sorted(saved, key=lambda one: one.created)),
        )

    def _remove(self, place: Path) -> None:
        """Out of sight first, at once, so that nobody sees half of it."""
        aside = _aside(place)
        os.replace(place, aside)
        shutil.rmtree(aside, ignore_errors=True)


def checked_path(path: object) -> str:
    if not isinstance(path, str) or not PATH.fullmatch(path):
        raise Refused(
            f"the path of a checkpoint is {shorten(repr(path), 200)}, wanted tinker://RUN/weights/NAME or "
            "tinker://RUN/sampler_weights/NAME"
        )
    return path


def _aside(place: Path) -> Path:
    """Where what is at `place` is moved to."""
    aside = place.with_name(REPLACED + place.name)
    shutil.rmtree(aside, ignore_errors=True)  # what an earlier server left
    return aside


def _write(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)
