"""Prompts from files (jsonl, parquet, saved Hugging Face data sets): all checked at once, each row read on demand."""

from __future__ import annotations

import bisect
import codecs
import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from corerl.data import media
from corerl.data.chat import Messages, parsed, read_messages, read_tools, readable, without_nulls
from corerl.data.digests import digest, digest_of_text, held_out_order
from corerl.data.prompts import Prompt, PromptSource, split
from corerl.data.reports import NO_REPORTS, Reports
from corerl.data.splits import Found
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean, short_repr
from corerl.plain_json import parse_json, read_json_file
from corerl.regular import require_regular

BATCH = 1024  # rows that are decoded together
NEWLINE = b"\n"
PATHS = "a .jsonl or .parquet file, a directory or a pattern of them, or a data set saved by `save_to_disk`"
OPTIONS = "chat_template_kwargs"  # the field with a row's own arguments of the chat template
# Fields that often belong to a prompt and are not shown to the model: the run says so once.
NOT_SHOWN = re.compile(
    r"system(_prompt|_message)?|instructions?|input|contexts?|documents?|passages|history|messages|conversations?|"
    r"few_shot|functions"
)
# Placeholders of values that a scan does not decode: an Image, or anything else.
PICTURE, OTHER = {"bytes": b"", "path": ""}, "something"
T = TypeVar("T")
PREFIX = 16  # bytes by which a picture is known


class Refused(Exception):
    """Why a row cannot be shown to the model; rows are counted by `kind`, which goes behind "rows"."""

    def __init__(self, kind: str, why: object) -> None:
        super().__init__(str(why))
        self.kind = kind


class Tally:
    """Counts rows by kind, and keeps where the first one is."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.first = ""

    def add(self, kind: str, where: str) -> None:
        self.counts[kind] += 1
        self.first = self.first or where

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        return f"{kinds}; the first: {self.first}"


class Rows(ABC):
    """The rows of one data set, numbered from 0; only their locations are kept in memory."""

    name: str
    columnar: bool = False  # whether an object in a row has the fields of all rows' objects, null where it lacks them

    @abstractmethod
    def __len__(self) -> int:
        """Of JSON lines it is known only once they are scanned; 0 before."""

    @abstractmethod
    def scan(self, column: str, *more: str) -> Iterator[tuple[str, Any]]:
        """Yield (where, row) for each row, in order; in the place of one that cannot be read, why. A row has `column`
        and `more`, if the data have them, and all other fields, but for columns of pictures and vectors: of those that
        are looked at, only whether they hold something."""

    def only_looked_at(self, *used: str) -> frozenset[str]:
        """The columns of which `scan` says only whether they hold something, where `used` are those it reads."""
        return frozenset()

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

    def scan(self, column: str, *more: str) -> Iterator[tuple[str, Any]]:
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

    def scan(self, column: str, *more: str) -> Iterator[tuple[str, Any]]:
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
                raise unreadable(path, error.strerror) from error
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
        return parse_json(line)
    except json.JSONDecodeError as error:  # whose own text has a line number, always 1
        why = f"{error.msg}, at character {error.pos + 1}; expected one JSON object per line"
    except ValueError as error:  # broken UTF-8, or a value that cannot be held
        why = str(error)
    return Refused("that are not JSON", f"not valid JSON: {why}")


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
        # Pictures and vectors are not decoded to see that they are there.
        large = self.only_looked_at(column, *more)
        columns = [name for name in self._table.column_names if name not in large]
        seen = [(name, held) for name, held in _looked_at(self._table.schema) if name in large]
        names = [*columns, *(name for name, _ in seen)]
        for batch in self._table.select(names).to_batches(max_chunksize=BATCH):
            rows = self._rows(batch.select(columns))
            for name, held in seen:
                for row, value in zip(rows, _glanced(batch.column(name), held), strict=True):
                    if value and isinstance(row, dict):
                        row[name] = value
            for row in rows:
                yield f"{self.name}, row {index}", row
                index += 1

    def only_looked_at(self, *used: str) -> frozenset[str]:
        return frozenset({each.name for each in self._table.schema if _is_large(each.type)}.difference(used))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        return self._rows(self._table.slice(index, 1))[0]

    def _rows(self, part: Any) -> list[Any]:
        """The rows of a table or record batch; in the place of one that cannot be read, why."""
        try:
            rows: list[Any] = part.to_pylist()
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, times that Python does not have
            if part.num_rows > 1:
                return [self._rows(part.slice(at, 1))[0] for at in range(part.num_rows)]
            return [Refused("that cannot be read", f"cannot be read: {error}")]
        if self._has_maps:
            kinds = {field.name: field.type for field in part.schema}
            return [{name: _with_objects(value, kinds[name]) for name, value in row.items()} for row in rows]
        return rows

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}"


def _inner(kind: Any) -> Any:
    """What the lists of a type hold, at any depth; any other type as it is."""
    return _inner(kind.value_type) if hasattr(kind, "value_type") else kind


def _is_large(kind: Any) -> bool:
    """Whether values of a type are pictures, sound or lists of numbers."""
    from pyarrow import types

    inner = _inner(kind)
    numbers = inner is not kind and (types.is_integer(inner) or types.is_floating(inner))
    return numbers or "binary" in str(kind) or str(inner).startswith("struct<array: ")


def _looked_at(schema: Any) -> Iterator[tuple[str, Any]]:
    """The columns that may hold media or context, by name or type, each with a placeholder for its values."""
    for field in schema:
        inner = _inner(field.type)
        if "binary" in str(inner) or str(inner).startswith("struct<array: "):
            yield field.name, PICTURE
        elif NOT_SHOWN.fullmatch(field.name) or media.kind_of_field(field.name):
            yield field.name, OTHER


def _glanced(column: Any, held: Any) -> list[Any]:
    """[n] the first bytes of binary values; `held` for objects and lists that are not empty."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_binary(kind) or types.is_large_binary(kind):
        return list(compute.binary_slice(column, 0, PREFIX).to_pylist())
    if types.is_struct(kind):
        there = np.any([child.is_valid().to_numpy(zero_copy_only=False) for child in column.flatten()], axis=0)
    elif types.is_list(kind) or types.is_large_list(kind):
        there = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False) > 0
    else:
        return list(column.to_pylist())
    return [held if each else None for each in there]


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


def open_rows(found: Found, name: str, reports: Reports = NO_REPORTS) -> Rows:
    """Open files of rows; columnar ones are checked whole, with `reports` of how far that is. Raises DataError if they
    hold none, ConfigError if pyarrow is missing."""
    paths = found.paths
    if os.path.isdir(paths[0]):
        return ArrowRows(_saved(paths[0], reports), name)
    try:
        for path in paths:
            require_regular(path)
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from error
    of_parquet = [path.suffix == ".parquet" for path in paths]
    if all(of_parquet):
        return ArrowRows(_parquet(paths, reports), name)
    if any(of_parquet):
        raise DataError(
            f"data.source: {name} has {sum(of_parquet)} .parquet files and {len(paths) - sum(of_parquet)} others; list "
            "files of different formats as separate [[data.sources]]"
        )
    for path in paths:
        if path.suffix != ".jsonl" and not _begins_with_object(path):
            file, stem = path.name, path.stem
            pandas = f"pandas.read_{path.suffix[1:]}({file!r}).to_json('{stem}.jsonl', orient='records', lines=True)"
            how = pandas if path.suffix in (".csv", ".json") else "one JSON object per line"
            raise DataError(
                f"data.source: {path} is not .jsonl or .parquet and does not begin with a JSON object; convert it to "
                f".jsonl: {how}"
            )
    return JsonlRows(paths, name)


def _begins_with_object(path: Path) -> bool:
    """Whether a file may hold one JSON object per line. True also for a file that is empty or cannot be read: reading
    it gives the better error."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()  # a .json may be one line, of any size
    except OSError:
        return True
    return not begin or begin.startswith(b"{")


def _parquet(files: Sequence[Path], reports: Reports) -> Any:
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
        raise unreadable(path, error) from error


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
        raise unreadable(directory, error) from error


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


def unreadable(path: Path, error: object) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(f"data.source: cannot read {path}: {reason}; expected {PATHS}")


class RowPrompts(PromptSource):
    """One prompt per row: a text or a list of messages. An answer that is not a string becomes its JSON text.

    Raises DataError, with file and line or row, for the first row that cannot be used, unless such rows are skipped.
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
        ignore: Collection[str] = (),
        skip: bool = False,
        reports: Reports = NO_REPORTS,
    ) -> None:
        """`chat`: texts become chats, which may have tools. `ignore`: fields that the model need not be shown. `skip`:
        leave out rows that cannot be shown to it. `reports` hears how many rows have been read."""
        self._rows = rows
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._tools_key = tools_key
        self._tools_of_texts = chat
        self._ignored = {prompt_key, answer_key, tools_key, *ignore}
        self._options_key = "" if OPTIONS in ignore else OPTIONS
        digests, asked, left_out = array("Q"), array("Q"), list[int]()  # the last one: numbers of rows
        refused, marked, not_shown = Tally(), Tally(), Tally()
        self._has: set[str] = set()  # of the two other fields, those that some row has
        used = prompt_key, answer_key, tools_key, OPTIONS
        large = rows.only_looked_at(*used)
        for number, (where, row) in enumerate(rows.scan(*used), start=1):
            if number % BATCH == 0:
                reports.tell(f"reading {rows.name}", number, len(rows))
            try:
                prompt = self._parse(row, index=len(digests))
            except Refused as error:
                if not skip:
                    raise DataError(f"{where}: {error}; data.refused='skip' leaves such rows out") from error
                left_out.append(number - 1)
                refused.add(error.kind, f"{where}: {error}")
                continue
            self.chat |= bool(prompt.messages)
            self._has.update({answer_key, tools_key} & row.keys())
            of_chats = set() if prompt.messages or chat else {tools_key, OPTIONS}.difference(ignore)
            for name in row:
                if (name in of_chats or (name not in self._ignored and NOT_SHOWN.fullmatch(name))) and row[name]:
                    not_shown.add(repr(name), where)
            if mark := media.MARK.search(prompt.text):
                marked.add(f"with {mark[0]}", where)
            if not prompt.answer:
                self.first_unanswered = self.first_unanswered if self.unanswered else len(digests)
                self.unanswered += 1
            held = {name: value for name, value in row.items() if name not in large} if large else row
            digests.append(digest(without_nulls(held), prompt_key, answer_key, tools_key))
            asked.append(digest_of_text(prompt.text))
        size = len(digests)
        self._numbers = np.delete(np.arange(size + len(left_out)), left_out) if left_out else None  # [n] of their rows
        of = f"{len(left_out)} of {size + len(left_out)} rows of {rows.name}"
        if not size:
            raise DataError(f"data.source: {of} cannot be shown to the model: {refused}")
        self.notices = tuple(
            f"data: {text}: {tally}"
            for text, tally in [
                (f"{of} are skipped, because they cannot be shown to the model", refused),
                (f"rows of {rows.name} have marks for pictures or sound, which are shown as text", marked),
                (f"rows of {rows.name} have fields that the model is not shown and prompts often need", not_shown),
            ]
            if tally.counts
        )
        seen, self.asked = np.array(digests, dtype=np.uint64), np.array(asked, dtype=np.uint64)
        self.divide([split(seen, held_out_order(seen, seed), held_out=held_out, name=rows.name)])

    def has(self, key: str) -> bool:
        """Whether some row has this field, the one of answers or of tools."""
        return key in self._has

    def require(self, key: str, *, setting: str) -> None:
        """Raise DataError, naming the setting, if no row has this field, the one of answers or of tools."""
        if not self.has(key):
            first = self.prompt(0).fields
            raise DataError(
                f"{self._rows.name}: no row has the field {key!r}; the first row has: {', '.join(first)}"
                f"{did_you_mean(key, first)}; set {setting}"
            )

    def _number(self, index: int) -> int:
        return index if self._numbers is None else int(self._numbers[index])

    def prompt(self, index: int) -> Prompt:
        try:
            return self._parse(self._rows[self._number(index)], index=index)
        except Refused as error:
            raise DataError(f"{self.where(index)}: {error}") from error

    def where(self, index: int) -> str:
        return self._rows.where(self._number(index))

    def _parse(self, row: Any, *, index: int) -> Prompt:
        key = self._prompt_key
        if isinstance(row, Refused):
            raise row
        if not isinstance(row, dict):
            raise Refused("that are no objects", f"got {_kind(row)}, expected a JSON object with the field {key!r}")
        if key not in row:
            raise Refused(
                "without a prompt",
                f"no field {key!r}; it has: {', '.join(row) or 'none'}{did_you_mean(key, row)}; set data.prompt_key",
            )
        for name, held in row.items():
            if name not in self._ignored and (kind := media.held(name, held)):
                raise Refused(
                    f"with {kind}",
                    f"field {name!r} has {kind}, which the model is not shown; list it in data.ignore if only rewards "
                    "need it",
                )
        value = row[key]
        if not isinstance(value, str | list) or not value:
            raise Refused(
                "without a prompt",
                f"field {key!r} is {_kind(value)}, expected a non-empty string or a list of messages",
            )
        messages: Messages = ()
        tools: Messages = ()
        options: Mapping[str, Any] = {}
        known = without_nulls if self._rows.columnar else _as_is
        if isinstance(value, list):
            messages = _read(read_messages, known(value), key, "messages")
        if messages or self._tools_of_texts:
            tools = _read(read_tools, known(row.get(self._tools_key)), self._tools_key, "tools")
            options = _read(_read_options, known(row.get(self._options_key)), OPTIONS, OPTIONS)
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
            template_options=options,
        )


def _as_is(value: Any) -> Any:
    return value


def _read(read: Callable[[Any], T], value: Any, field: str, what: str) -> T:
    try:
        return read(value)
    except ValueError as error:
        kind = media.held_by_messages(value) or f"{what} that cannot be read"
        raise Refused(f"with {kind}", f"field {field!r}: {error}") from error


def _read_options(value: Any) -> Mapping[str, Any]:
    """A row's own arguments of the chat template: an object, or JSON text of one. Raises ValueError."""
    options = parsed(value) or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"got {short_repr(value)}, wanted an object; list the field in data.ignore if it is another")
    return options


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
