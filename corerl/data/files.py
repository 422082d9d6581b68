"""Open the files that `data.source` names: JSON lines are read here, all others and directories by `datasets`."""

from __future__ import annotations

import bisect
import glob
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corerl.data.chat import parse_json
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean, shorten

BATCH = 128  # rows that are decoded together, which may have pictures
NEWLINE = b"\n"
JSONL = ".jsonl"
LOADERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow", ".json": "json"}  # of `datasets`
PATHS = (
    "a .jsonl, .parquet, .csv, .arrow or .json file, a directory or a pattern of them, or a data set saved by "
    "`save_to_disk`"
)
TRAIN = "train"


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


class ArrowRows(Rows):
    """The rows of a data set of `datasets`, whose files are mapped into memory."""

    columnar = True

    def __init__(self, dataset: Any, name: str) -> None:
        self._table = dataset.data.table  # undecoded: pictures stay bytes
        self.name = name

    def scan(self) -> Iterator[tuple[str, Any]]:
        if not len(self):
            raise DataError(f"data.source: {self.name} has no rows")
        index = 0
        for batch in self._table.to_batches(max_chunksize=BATCH):
            for row in self._rows(batch):
                yield self.where(index), row
                index += 1

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        return self._rows(self._table.slice(index, 1))[0]

    def _rows(self, part: Any) -> list[Any]:
        """The rows of a table or record batch; in the place of one that cannot be read, why."""
        try:
            return list(part.to_pylist())
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, times that Python does not have
            if part.num_rows > 1:
                return [self._rows(part.slice(at, 1))[0] for at in range(part.num_rows)]
            return [Refused("that cannot be read", f"cannot be read: {error}")]

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}"


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
    does not have, or if `datasets` is missing."""
    path = Path(source)
    if os.path.isdir(path):
        rows = _of_directory(path, split, subset, common, texts)
        rows.root = os.path.abspath(source)
        return rows
    _require_no_choice(source, split=split, subset=subset)
    found = glob.glob(source, recursive=True) if is_pattern(source) else []
    files = sorted(Path(each) for each in found if os.path.isfile(each)) if is_pattern(source) else [path]
    if not files:
        raise DataError(f"data.source: no file matches {source!r}; correct the pattern, or name a file or directory")
    rows = _of_files(files, source, texts)
    rows.root = os.path.commonpath([file.parent.absolute() for file in files])
    return rows


def _of_files(files: Sequence[Path], name: str, texts: Sequence[str]) -> Rows:
    if all(file.suffix == JSONL for file in files):
        return JsonlRows(files, name)
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1 or suffixes[0] not in LOADERS:
        raise DataError(
            f"data.source: {name} has files of the formats {', '.join(suffixes)}, expected {PATHS}; convert them to "
            "one format, such as .jsonl with one JSON object per line, or list them as separate [[data.sources]]"
        )
    datasets, loader = _datasets(name), LOADERS[suffixes[0]]
    options: dict[str, Any] = {}
    if loader == "csv":  # pandas would make numbers of answers such as 007 and 0.50, and nothing of None
        options = {"converters": dict.fromkeys(texts, str), "keep_default_na": False, "na_values": [""]}
    try:
        loaded = datasets.load_dataset(loader, data_files=[str(file) for file in files], split=TRAIN, **options)
    except Exception as error:  # of whatever reads the format
        raise unreadable(name, error) from error
    return ArrowRows(loaded, name)


def _of_directory(path: Path, split: str, subset: str, common: tuple[str, str], texts: Sequence[str]) -> Rows:
    name = str(path)
    datasets = _datasets(name)
    if (path / "refs" / "main").is_file() and (path / "snapshots").is_dir():  # of Hugging Face's cache
        path = path / "snapshots" / (path / "refs" / "main").read_text().strip()
    saved = [(path / file).is_file() for file in ("state.json", "dataset_dict.json")]
    splits: Mapping[str, Any]
    try:
        if any(saved):
            _require_no_choice(name, subset=subset)
            loaded = datasets.load_from_disk(str(path))
            if saved[0]:
                _require_no_choice(name, split=split)
                return ArrowRows(loaded, name)
            splits = loaded
        else:
            splits = _splits(datasets, path, subset, common[1])
    except (ConfigError, DataError):
        raise
    except Exception as error:  # of whatever reads a card or a file
        raise unreadable(name, error) from error
    if (chosen := split or common[0] or TRAIN) not in splits:
        raise ConfigError(
            f"data.split: {chosen!r}, but {name} has the splits {', '.join(splits)}; set it to one of them"
            f"{did_you_mean(chosen, splits)}"
        )
    rows = ArrowRows(splits[chosen], name) if any(saved) else _of_files(splits[chosen], name, texts)
    if unread := [each for each in splits if each != chosen]:
        rows.notice = f"data.source: of {name}, the split {chosen} is read; not read: {', '.join(unread)}"
    return rows


def _splits(datasets: Any, path: Path, subset: str, common: str) -> Mapping[str, Sequence[Path]]:
    """The files of each split of a directory, as `datasets` finds them by the data set's card or by their names."""
    subsets = datasets.get_dataset_config_names(str(path))
    if subsets == ["default"]:
        _require_no_choice(str(path), subset=subset)
    else:
        subset = subset or common or datasets.get_dataset_default_config_name(str(path)) or ""
        if subset not in subsets:
            raise ConfigError(
                f"data.subset: {subset!r}, but {path} has the subsets {', '.join(subsets)}; set it to one of them"
                f"{did_you_mean(subset, subsets)}"
            )
    builder = datasets.load_dataset_builder(str(path), subset or None)
    return {
        str(name): [Path(os.path.abspath(file)) for file in files] for name, files in builder.config.data_files.items()
    }


def _require_no_choice(source: str, **choices: str) -> None:
    for name, chosen in choices.items():
        if chosen:
            raise ConfigError(f"data.{name}: {chosen!r}, but {source} has no {name}s; remove it")


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data.source: reading {source} requires `datasets`, which is not installed; pip install 'corerl[data]'"
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def unreadable(source: str | Path, error: Exception) -> DataError:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else " ".join(str(cause).split())
    return DataError(f"data.source: cannot read {source}: {shorten(str(reason), 300)}; expected {PATHS}")
