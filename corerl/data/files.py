"""Open the files that `data.source` names: JSON lines are read here, all others and directories by wheels."""

from __future__ import annotations

import bisect
import glob
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corerl.data.chat import parse_json
from corerl.errors import ConfigError, DataError
from corerl.messages import install_hint, shorten
from corerl.plugin.registry import Kind, Loaded, load, load_implementation, scan, usable

NEWLINE = b"\n"
JSONL = ".jsonl"
PATHS = (
    "a .jsonl, .parquet, .csv, .arrow or .json file, a directory or a pattern of them, or a data set saved by "
    "`save_to_disk`"
)


class Refused(Exception):
    """Why a row cannot be shown to the model; rows are counted by `kind`, which follows the word "rows"."""

    def __init__(self, kind: str, why: object) -> None:
        super().__init__(str(why))
        self.kind = kind


class Rows(ABC):
    """The rows of one data set, numbered from 0; only their locations are kept in memory."""

    name: str
    notice: str = ""  # a line about splits that are not read
    columnar: bool = False  # whether an object in a row has the fields of all rows' objects, null where it lacks them
    root: str = ""  # the directory of the files, if there are any: the deepest that holds all of them

    @abstractmethod
    def __len__(self) -> int:
        """Of JSON lines it is known only once they are scanned; 0 before."""

    @abstractmethod
    def scan(self) -> Iterator[tuple[str, Any]]:
        """Yield (where, row) for each row, in order; in the place of one that cannot be read, why."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    @abstractmethod
    def where(self, index: int) -> str:
        """The row's place, for messages."""


class GivenRows(Rows):
    """Objects that a plugin has."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        self._rows = rows
        self.name = name

    def __len__(self) -> int:
        return len(self._rows)

    def scan(self) -> Iterator[tuple[str, Any]]:
        yield from ((self.where(index), self[index]) for index in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        return dict(row) if isinstance(row, Mapping) else row

    def where(self, index: int) -> str:
        return f"row {index} of {self.name}"


class JsonlRows(Rows):
    """One JSON object per line; blank lines are skipped. Only byte offsets are kept, which the scan finds."""

    def __init__(self, paths: Sequence[Path], name: str) -> None:
        self._paths = paths
        self.name = name
        self._offsets = np.zeros(0, dtype=np.int64)
        self._firsts: list[int] = []  # of each file the number of its first row

    def scan(self) -> Iterator[tuple[str, Any]]:
        offsets: list[int] = []
        for path in self._paths:
            self._firsts.append(len(offsets))
            at = 0
            try:
                with path.open("rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        if line.strip():
                            offsets.append(at)
                            yield f"{path}:{number}", _json(line)
                        at += len(line)
            except OSError as error:
                raise unreadable(path, error) from error
        if not offsets:
            raise DataError(f"data.source: {self.name} is empty, expected one JSON object per line")
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def _path(self, index: int) -> Path:
        return self._paths[bisect.bisect_right(self._firsts, index) - 1]

    def __getitem__(self, index: int) -> Any:
        with self._path(index).open("rb") as lines:
            lines.seek(self._offsets[index])
            return _json(lines.readline())

    def where(self, index: int) -> str:
        with self._path(index).open("rb") as lines:  # read again: only a message needs it
            before = lines.read(int(self._offsets[index]))
        return f"{self._path(index)}:{1 + before.count(NEWLINE)}"


def _json(line: bytes) -> Any:
    try:
        return parse_json(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:  # whose own text has a line number, always 1
        why = f"{error.msg}, at character {error.pos + 1}; expected one JSON object per line"
    except ValueError as error:  # broken UTF-8, or a value that cannot be held
        why = str(error)
    return Refused("that are not JSON", f"not valid JSON: {why}")


# ---- what a source names ---------------------------------------------------------------------------------------------


def is_pattern(source: str) -> bool:
    return glob.has_magic(source) and not os.path.exists(source)


def open_rows(
    source: str,
    *,
    split: str = "",
    subset: str = "",
    common: tuple[str, str] = ("", ""),
    texts: Sequence[str] = (),
) -> Rows:
    """The rows of a source. `split` and `subset` choose among those of a directory; '' the `common` ones, if it has
    several, and else the split `train` and the default subset. `texts` are columns that stay text in a .csv file, where
    others may become numbers. Raises DataError if there is nothing to read, ConfigError for a choice that the source
    does not have, or if no wheel reads it."""
    path = Path(source)
    if os.path.isdir(path):
        rows = _reader([""], source)(path, source, split=split, subset=subset, common=common, texts=texts)
        rows.root = os.path.abspath(source)
        return rows
    require_no_choice(source, split=split, subset=subset)
    found = glob.glob(source, recursive=True) if is_pattern(source) else []
    files = sorted(Path(each) for each in found if os.path.isfile(each)) if is_pattern(source) else [path]
    if not files:
        raise DataError(f"data.source: no file matches {source!r}; correct the pattern, or name a file or directory")
    suffixes = sorted({file.suffix for file in files})
    rows = JsonlRows(files, source) if suffixes == [JSONL] else _reader(suffixes, source)(files, source, texts=texts)
    rows.root = os.path.commonpath([file.parent.absolute() for file in files])
    return rows


def formats_here() -> list[Loaded]:
    """The wheels that read other files. Raises PluginError if there are some, and none can be used."""
    return usable(Kind.FORMATS) or [load(Kind.FORMATS, each.name) for each in scan(Kind.FORMATS)]


def known_suffixes() -> set[str]:
    """Of files that can be read."""
    return {JSONL, *(suffix for each in usable(Kind.FORMATS) for suffix in each.spec.suffixes)}


def _reader(suffixes: Sequence[str], name: str) -> Callable[..., Rows]:
    """What a wheel reads files of one suffix with, or a directory, whose suffix is ""."""
    formats = formats_here()
    for each in formats:
        if len(suffixes) == 1 and suffixes[0] in ("", *each.spec.suffixes):
            reader: Callable[..., Rows] = load_implementation(Kind.FORMATS, each)
            return reader
    if not formats:
        raise ConfigError(
            f"data.source: without a wheel that reads other files only {JSONL} files are read; "
            f"{install_hint('data')} to read {name}"
        )
    raise DataError(
        f"data.source: {name} has files of the formats {', '.join(suffixes)}, expected {PATHS}; convert them to "
        "one format, such as .jsonl with one JSON object per line, or list them as separate [[data.sources]]"
    )


def require_no_choice(source: str, **choices: str) -> None:
    """Raise ConfigError if a split or a subset is chosen of a source that has none."""
    for name, chosen in choices.items():
        if chosen:
            raise ConfigError(f"data.{name}: {chosen!r}, but {source} has no {name}s; remove it")


def unreadable(source: str | Path, error: Exception) -> DataError:
    """The error for files that raised this one."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else " ".join(str(cause).split())
    return DataError(f"data.source: cannot read {source}: {shorten(str(reason), 300)}; expected {PATHS}")
