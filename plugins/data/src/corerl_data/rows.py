"""Rows of files and directories as `datasets` reads them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from corerl.data import JsonlRows, Refused, Rows, require_no_choice, unreadable
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean

BATCH = 128  # rows that are decoded together, which may have pictures
LOADERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow", ".json": "json"}  # of `datasets`
TRAIN = "train"


def open_rows(
    source: Path | Sequence[Path],
    name: str,
    *,
    split: str = "",
    subset: str = "",
    common: tuple[str, str] = ("", ""),
    texts: Sequence[str] = (),
) -> Rows:
    """The rows of a directory, or of files of one format, which messages call `name`. `split` and `subset` choose among
    those of a directory; "" the `common` ones, if it has several, and else the split `train` and the default subset.
    `texts` are columns that stay text in a .csv file, where others may become numbers. Raises DataError if there is
    nothing to read, ConfigError for a choice that the source does not have."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if isinstance(source, Path):
        return _of_directory(source, name, split, subset, common, texts)
    return _of_files(source, name, texts)


def _of_files(files: Sequence[Path], name: str, texts: Sequence[str]) -> Rows:
    suffixes = sorted({file.suffix for file in files})
    if suffixes == [".jsonl"]:
        return JsonlRows(files, name)
    if len(suffixes) > 1 or suffixes[0] not in LOADERS:
        raise DataError(
            f"data.source: {name} has files of the formats {', '.join(suffixes)}; convert them to one format, such as "
            ".jsonl with one JSON object per line, or list them as separate [[data.sources]]"
        )
    loader = LOADERS[suffixes[0]]
    options: dict[str, Any] = {}
    if loader == "csv":  # pandas would make numbers of answers such as 007 and 0.50, and nothing of None
        options = {"converters": dict.fromkeys(texts, str), "keep_default_na": False, "na_values": [""]}
    try:
        loaded = datasets.load_dataset(loader, data_files=[str(file) for file in files], split=TRAIN, **options)
    except Exception as error:  # of whatever reads the format
        raise unreadable(name, error) from error
    return ArrowRows(loaded, name)


def _of_directory(
    path: Path, name: str, split: str, subset: str, common: tuple[str, str], texts: Sequence[str]
) -> Rows:
    if (path / "refs" / "main").is_file() and (path / "snapshots").is_dir():  # of Hugging Face's cache
        path = path / "snapshots" / (path / "refs" / "main").read_text().strip()
    saved = [(path / file).is_file() for file in ("state.json", "dataset_dict.json")]
    splits: Mapping[str, Any]
    try:
        if any(saved):
            require_no_choice(name, subset=subset)
            loaded = datasets.load_from_disk(str(path))
            if saved[0]:
                require_no_choice(name, split=split)
                return ArrowRows(loaded, name)
            splits = loaded
        else:
            splits = _splits(path, subset, common[1])
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


def _splits(path: Path, subset: str, common: str) -> Mapping[str, Sequence[Path]]:
    """The files of each split of a directory, as `datasets` finds them by the data set's card or by their names."""
    subsets = datasets.get_dataset_config_names(str(path))
    if subsets == ["default"]:
        require_no_choice(str(path), subset=subset)
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
