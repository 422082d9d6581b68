"""Prompts from files (jsonl, parquet, saved Hugging Face data sets): all checked at once, each row read on demand."""

from __future__ import annotations

import codecs
import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from corerl.data.chat import Messages, read_messages, read_tools, readable, without_nulls
from corerl.data.digests import digest, held_out_order
from corerl.data.prompts import Prompt, PromptSource, split
from corerl.data.reports import NO_REPORTS, Reports
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean
from corerl.plain_json import parse_json, read_json_file
from corerl.regular import require_all_regular, require_regular

BATCH = 1024  # rows that are decoded together
NEWLINE = b"\n"
LARGE = re.compile(r"binary|list<[^:]*: (float|double|halffloat|u?int)")  # pictures, vectors: not in digests


class Rows(ABC):
    """The rows of one data set, numbered from 0; only their locations are kept in memory."""

    name: str
    columnar: bool = False  # whether an object in a row has the fields of all rows' objects, null where it lacks them

    @abstractmethod
    def __len__(self) -> int:
        """Of JSON lines it is known only once they are scanned; 0 before."""

    @abstractmethod
    def scan(self, column: str, *more: str) -> Iterator[tuple[str, Any]]:
        """Yield (where, row) for each row, in order; a row holds at least `column` and `more`, if the data has them. It
        lacks only columns of pictures and vectors."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    @abstractmethod
    def where(self, index: int) -> str:
        """The row's place, for messages."""


class JsonlRows(Rows):
    """One JSON object per line; blank lines are skipped. Only byte offsets are kept, which the scan finds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        self._offsets = np.zeros(0, dtype=np.int64)

    def scan(self, column: str, *more: str) -> Iterator[tuple[str, Any]]:
        offsets: list[int] = []
        at = 0
        try:
            with self._path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        where = f"{self._path}:{number}"
                        offsets.append(at)
                        yield where, _json(line, where)
                    at += len(line)
        except OSError as error:
            raise _unreadable(self._path, error.strerror) from error
        if not offsets:
            raise DataError(f"data.source: {self._path} is empty, expected one JSON object per line")
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Any:
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[index])
            return _json(lines.readline(), f"{self._path}, prompt {index}")

    def where(self, index: int) -> str:
        with self._path.open("rb") as lines:  # read again: only a message needs it
            before = lines.read(int(self._offsets[index]))
        return f"{self._path}:{1 + before.count(NEWLINE)}"


def _json(line: bytes, where: str) -> Any:
    try:
        return parse_json(line)
    except json.JSONDecodeError as error:  # whose own text has a line number, always 1
        raise DataError(
            f"{where}: not valid JSON: {error.msg}, at character {error.pos + 1}; expected one JSON object per line"
        ) from error
    except ValueError as error:  # broken UTF-8, or a value that cannot be held
        raise DataError(f"{where}: not valid JSON: {error}") from error


class ArrowRows(Rows):
    """The rows of an Arrow table in memory-mapped files: the system pages them in and out as needed."""

    columnar = True

    def __init__(self, table: Any, name: str) -> None:
        self._table = table  # pyarrow.Table
        self.name = name
        self._has_maps = "map<" in str(table.schema)

    def scan(self, column: str, *more: str) -> Iterator[tuple[str, Any]]:
        if not len(self._table):
            raise DataError(f"data.source: {self.name} has no rows")
        if column not in self._table.column_names:
            yield f"{self.name}, row 0", self[0]
            return
        index = 0
        used = {column, *more}
        columns = [each.name for each in self._table.schema if each.name in used or not LARGE.search(str(each.type))]
        for batch in self._table.select(columns).to_batches(max_chunksize=BATCH):
            for row in self._rows(batch, index):
                yield f"{self.name}, row {index}", row
                index += 1

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        return self._rows(self._table.slice(index, 1), index)[0]

    def _rows(self, part: Any, first: int) -> list[dict[str, Any]]:
        """The rows of a table or record batch, whose first one is the row `first`."""
        try:
            rows: list[dict[str, Any]] = part.to_pylist()
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, times that Python does not have
            if part.num_rows > 1:
                return [self._rows(part.slice(at, 1), first + at)[0] for at in range(part.num_rows)]
            raise DataError(f"{self.where(first)}: cannot be read: {error}") from error
        if self._has_maps:
            kinds = {field.name: field.type for field in part.schema}
            return [{name: _with_objects(value, kinds[name]) for name, value in row.items()} for row in rows]
        return rows

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}"


def _with_objects(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, with its maps as objects, whose keys are text as JSON's are; pyarrow makes lists of
    pairs of them."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_map(kind):
        return {_text(key): _with_objects(held, kind.item_type) for key, held in value}
    if types.is_struct(kind):
        return {name: _with_objects(held, kind.field(name).type) for name, held in value.items()}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_with_objects(each, kind.value_type) for each in value]
    return value


def _text(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def open_rows(path: Path, reports: Reports = NO_REPORTS) -> Rows:
    """Open a file or directory of rows; columnar ones are checked whole, with `reports` of how far that is. Raises
    DataError if it holds none, ConfigError if pyarrow is missing."""
    try:
        (require_all_regular if os.path.isdir(path) else require_regular)(path)
    except OSError as error:
        raise _unreadable(Path(error.filename or path), error) from error
    if os.path.isdir(path) and (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if (entry / "state.json").is_file()))
        raise DataError(f"data.source: {path} contains several splits ({splits}); use the directory of one split")
    if os.path.isdir(path) and (path / "state.json").is_file():
        return ArrowRows(_saved(path, reports), str(path))
    if os.path.isdir(path):
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise DataError(
                f"data.source: {path} contains neither .parquet files nor a data set saved by `save_to_disk`; "
                "use a directory that does, or a .jsonl or .parquet file"
            )
        return ArrowRows(_parquet(files, reports), str(path))
    if path.suffix == ".parquet":
        return ArrowRows(_parquet([path], reports), str(path))
    if path.suffix != ".jsonl" and not _begins_with_object(path):
        with_pandas = (
            f"pandas.read_{path.suffix[1:]}({path.name!r}).to_json('{path.stem}.jsonl', orient='records', lines=True)"
        )
        how = with_pandas if path.suffix in (".csv", ".json") else "one JSON object per line"
        raise DataError(
            f"data.source: {path} is not .jsonl or .parquet and does not begin with a JSON object; convert it to "
            f".jsonl: {how}"
        )
    return JsonlRows(path)


def _begins_with_object(path: Path) -> bool:
    """Whether a file may hold one JSON object per line. True also for a file that is empty or cannot be read: reading
    it gives the better error."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()  # a .json may be one line, of any size
    except OSError:
        return True
    return not begin or begin.startswith(b"{")


def _parquet(files: list[Path], reports: Reports) -> Any:
    """All rows of the files, unpacked into a temporary file, since a single row of a parquet file cannot be read."""
    arrow = _pyarrow(files[0])
    path = files[0]
    try:
        schema = arrow.parquet.ParquetFile(path).schema_arrow
        with tempfile.NamedTemporaryFile(prefix="corerl-", suffix=".arrow") as unpacked:
            with arrow.ipc.new_stream(unpacked.name, schema) as writer:
                done, of = 0, sum(arrow.parquet.read_metadata(each).num_rows for each in files)
                for path in files:
                    file = arrow.parquet.ParquetFile(path)
                    if not file.schema_arrow.equals(schema):
                        raise DataError(
                            f"data.source: {path} has the columns {_columns(file.schema_arrow)}, but {files[0].name} "
                            f"has {_columns(schema)}; list different data sets as separate [[data.sources]]"
                        )
                    for batch in file.iter_batches(batch_size=BATCH):
                        batch.validate(full=True)
                        writer.write_batch(batch)
                        done += batch.num_rows
                        reports.tell(f"unpacking {path}", done, of)
            return _mapped(arrow, Path(unpacked.name))  # the mapping outlives the deleted file
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _saved(directory: Path, reports: Reports) -> Any:
    """All rows of a data set that `datasets` saved: a list of Arrow files."""
    arrow = _pyarrow(directory)
    try:
        files = read_json_file(directory / "state.json")["_data_files"]
        table = arrow.concat_tables([_mapped(arrow, directory / file["filename"]) for file in files])
        done = 0
        for batch in table.to_batches():
            batch.validate(full=True)  # else rows of damaged files raise anything, or read what is not theirs
            done += batch.num_rows
            reports.tell(f"checking {directory}", done, len(table))
        return table
    except (OSError, ValueError, LookupError, TypeError, arrow.ArrowException) as error:
        raise _unreadable(directory, error) from error


def _mapped(arrow: Any, path: Path) -> Any:
    table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
    _ = table.column_names  # raises here if they are no UTF-8
    return table


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"data.source: reading {path} requires pyarrow, which is not installed; pip install 'corerl[data]'"
        ) from error
    return pyarrow


def _unreadable(path: Path, error: object) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(
        f"data.source: cannot read {path}: {reason}; expected a .jsonl or .parquet file, a directory of .parquet "
        "files, or a data set saved by `save_to_disk`"
    )


class RowPrompts(PromptSource):
    """One prompt per row: a text or a list of messages. An answer that is not a string becomes its JSON text.

    Raises DataError, with file and line or row, for the first row that cannot be used.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        prompt_key: str,
        answer_key: str,
        held_out: int,
        seed: int,
        tools_key: str = "",
        chat: bool = False,
        reports: Reports = NO_REPORTS,
    ) -> None:
        """`chat`: texts become chats, which may have tools. `reports` hears how many rows have been read."""
        self._rows = rows
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._tools_key = tools_key
        self._tools_of_texts = chat
        self._has: set[str] = set()  # of the two other fields, those that some row has
        digests = array("Q")
        known = without_nulls if rows.columnar else _as_is
        for where, row in rows.scan(prompt_key, answer_key, tools_key):
            size = len(digests)
            prompt = self._parse(row, index=size, where=where)
            digests.append(digest(known(row), prompt_key, answer_key, tools_key))
            self.chat |= bool(prompt.messages)
            self._has.update({answer_key, tools_key} & row.keys())
            if not prompt.answer:
                self.first_unanswered = self.first_unanswered if self.unanswered else size
                self.unanswered += 1
            if len(digests) % BATCH == 0:
                reports.tell(f"reading {rows.name}", len(digests), len(rows))
        seen = np.array(digests, dtype=np.uint64)
        self.divide([split(seen, held_out_order(seen, seed), held_out=held_out, name=rows.name)])

    def has(self, key: str) -> bool:
        """Whether some row has this field, the one of answers or of tools."""
        return key in self._has

    def require(self, key: str, *, setting: str) -> None:
        """Raise DataError, naming the setting, if no row has this field, the one of answers or of tools."""
        if not self.has(key):
            first = self._rows[0]
            raise DataError(
                f"{self._rows.name}: no row has the field {key!r}; the first row has: {', '.join(first)}"
                f"{did_you_mean(key, first)}; set {setting}"
            )

    def prompt(self, index: int) -> Prompt:
        return self._parse(self._rows[index], index=index, where=f"{self._rows.name}, prompt {index}")

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def _parse(self, row: Any, *, index: int, where: str) -> Prompt:
        key = self._prompt_key
        if not isinstance(row, dict):
            raise DataError(f"{where}: got {_kind(row)}, expected a JSON object with the field {key!r}")
        if key not in row:
            raise DataError(
                f"{where}: no field {key!r}; it has: {', '.join(row) or 'none'}"
                + did_you_mean(key, row)
                + "; set data.prompt_key"
            )
        value = row[key]
        if not isinstance(value, str | list) or not value:
            raise DataError(
                f"{where}: field {key!r} is {_kind(value)}, expected a non-empty string or a list of messages"
            )
        messages: Messages = ()
        tools: Messages = ()
        known = without_nulls if self._rows.columnar else _as_is
        if isinstance(value, list):
            messages = _read(read_messages, known(value), f"{where}: field {key!r}")
        if messages or self._tools_of_texts:
            tools = _read(read_tools, known(row.get(self._tools_key)), f"{where}: field {self._tools_key!r}")
        answer = row.get(self._answer_key)
        if not isinstance(answer, str):
            answer = "" if answer is None else json.dumps(answer, default=str)  # parquet has dates and the like
        return Prompt(
            index=index,
            text=value if isinstance(value, str) else readable(messages),
            answer=answer,
            fields=row,
            messages=messages,
            tools=tools,
        )


def _as_is(value: Any) -> Any:
    return value


def _read(read: Callable[[Any], Messages], value: Any, where: str) -> Messages:
    try:
        return read(value)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _kind(value: object) -> str:
    """A value's type, in words."""
    match value:
        case "":
            return "an empty string"
        case []:
            return "an empty list"
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case bytes():
            return "binary data"
        case list():
            return "a list"
        case _:
            return "an object"
