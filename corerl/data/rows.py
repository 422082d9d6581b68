"""The prompts that `[data]` describes: of rows all are checked at once, and each is read again when it is taken."""

from __future__ import annotations

import json
import os
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import fields

from corerl.config.schema import DataConfig, DataSource
from corerl.data import media
from corerl.data.chat import Messages, parsed, read_messages, read_tools, readable, without_nulls
from corerl.data.digests import digest, digest_of_question, held_out_order
from corerl.data.files import PATHS, Refused, Rows, is_pattern, known_suffixes, open_rows
from corerl.data.prompts import MixedPrompts, Prompt, PromptSource, SortDigits, split
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean, did_you_mean_path, short_repr
from corerl.pictures import FoundPicture, PictureReader

BATCH = 128  # rows between two looks at the clock
EVERY = 10.0  # seconds between two lines about how many rows are read, and before the first
SHOWN = 60  # characters of a value in a message
OPTIONS = "chat_template_kwargs"  # the field with a row's own arguments of the chat template
# Names of fields that prompts often need: the run says once that the model is not shown them.
NOT_SHOWN = re.compile(
    r"system(_prompt|_message)?|instructions?|input|contexts?|documents?|passages|history|messages|conversations?|"
    r"few_shot|functions|tools"
)
T = TypeVar("T")


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
        answers: bool = False,
        tools_key: str = "",
        chat: bool = False,
        system: str = "",
        ignore: Collection[str] = (),
        skip: bool = False,
        pictures: PictureReader | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """`answers`: some row must have one. `chat`: texts become chats, which may have tools. `system` begins every
        chat that has no system message. `ignore`: fields that the model need not be shown. `skip`: leave out rows that
        cannot be shown to it. `pictures` finds those of a row. `notify` gets a line now and then about how many rows
        are read."""
        self._rows = rows
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._tools_key = tools_key
        self.chat = self._chat = chat
        self._system = system
        self._ignored = {prompt_key, answer_key, tools_key, *ignore}
        self._options_key = "" if OPTIONS in ignore else OPTIONS
        self._pictures = pictures
        digests, asked, left_out = array("Q"), array("Q"), list[int]()  # the last one: numbers of rows
        refused, not_shown, unanswered = Tally(), Tally(), Tally()
        noticed = time.monotonic()
        for number, (where, row) in enumerate(rows.scan(), start=1):
            if notify is not None and number % BATCH == 0 and time.monotonic() >= noticed + EVERY:
                noticed = time.monotonic()
                notify(f"reading {rows.name}: {number:,} {f'of {len(rows):,} ' if len(rows) else ''}rows")
            try:
                prompt = self._parse(row, index=len(digests))
            except Refused as error:
                if not skip:
                    raise DataError(f"{where}: {error}; data.refused='skip' leaves such rows out") from error
                left_out.append(number - 1)
                refused.add(error.kind, f"{where}: {error}")
                continue
            self.chat |= bool(prompt.messages)
            for_chats = set() if prompt.messages else {tools_key, OPTIONS}.difference(ignore)
            for name in row:
                if (name in for_chats or (name not in self._ignored and NOT_SHOWN.fullmatch(name))) and row[name]:
                    not_shown.add(repr(name), where)
            if not prompt.answer:
                unanswered.add("without an answer", where)
            keys = prompt_key, answer_key, tools_key
            digests.append(digest(without_nulls(row), *keys, pictures=bool(prompt.pictures)))
            references = [each.reference for each in prompt.pictures if isinstance(each, FoundPicture)]
            asked.append(digest_of_question(prompt.text, references))
        size = len(digests)
        self._numbers = np.delete(np.arange(size + len(left_out)), left_out) if left_out else None  # [n] of their rows
        of = f"{len(left_out)} of {size + len(left_out)} rows of {rows.name}"
        if not size:
            raise DataError(f"data.source: {of} cannot be shown to the model: {refused}")
        self.notices = (rows.notice,) * bool(rows.notice) + tuple(
            f"data: {text}: {tally}"
            for text, tally in [
                (f"{of} are skipped, because they cannot be shown to the model", refused),
                (f"rows of {rows.name} have fields that prompts often need and the model is not shown", not_shown),
            ]
            if tally.counts
        )
        if unanswered.counts:
            self.notices += (self._about_answers(unanswered, size, required=answers),)
        seen, self.asked = np.array(digests, dtype=np.uint64), np.array(asked, dtype=np.uint64)
        self.divide([split(seen, held_out_order(seen, seed), held_out=held_out, name=rows.name)])

    def _about_answers(self, unanswered: Tally, size: int, *, required: bool) -> str:
        """A line about rows without an answer. Raises DataError if no row has one, and that is `required`."""
        if (without := unanswered.counts.total()) < size:
            return f"data: {without} of {size} prompts have no answer; the first: {unanswered.first}"
        key, fields = self._answer_key, self.prompt(0).fields
        line = f"data.answer_key: none of the {size} prompts of {self._rows.name} has an answer under {key!r}"
        line += f"; the first one has: {', '.join(fields)}"
        if required:
            raise DataError(line + did_you_mean(key, fields))
        return line

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
            raise Refused(
                "that are no objects", f"got {short_repr(row, SHOWN)}, expected a JSON object with the field {key!r}"
            )
        if key not in row:
            raise Refused(
                "without a prompt",
                f"no field {key!r}; it has: {', '.join(row) or 'none'}{did_you_mean(key, row)}; set data.prompt_key",
            )
        value, pictures = self._shown(row)
        if not isinstance(value, str | list) or not value:
            raise Refused(
                "without a prompt",
                f"field {key!r} is {short_repr(value, SHOWN)}, expected a non-empty string or a list of messages",
            )
        messages: Messages = ()
        tools: Messages = ()
        options: Mapping[str, Any] = {}
        known = without_nulls if self._rows.columnar else (lambda held: held)
        if isinstance(value, list):
            messages = _read(partial(read_messages, pictures=bool(pictures)), known(value), key, "messages")
        if messages or self._chat:
            tools = _read(read_tools, known(row.get(self._tools_key)), self._tools_key, "tools")
            options = _read(_read_options, known(row.get(self._options_key)), OPTIONS, OPTIONS)
        answer = row.get(self._answer_key)
        if not isinstance(answer, str):
            answer = "" if answer is None else json.dumps(answer, default=str)  # parquet has dates and the like
        prompt = Prompt(
            index=index,
            text=value if isinstance(value, str) else readable(messages),
            answer=answer,
            fields=row,
            messages=messages,
            tools=tools,
            template_options=options,
            pictures=pictures,
        )
        return prompt.as_chat(system=self._system) if messages or self._chat else prompt

    def _shown(self, row: Mapping[str, Any]) -> tuple[Any, tuple[FoundPicture, ...]]:
        """The row's prompt with marks for its pictures, and these. Raises Refused for what the model is not shown."""
        value = row[self._prompt_key]
        pictures: tuple[FoundPicture, ...] = ()
        if (reader := self._pictures) is not None:
            if self._chat and isinstance(value, str) and value:
                value = [{"role": "user", "content": value}]
            value, references = reader.find(row, value, root=self._rows.root)
            pictures = tuple(FoundPicture(reader=reader, reference=each) for each in references)
        for name, held in row.items():
            kind = media.kind_in_field(name, held) if name not in self._ignored else ""
            if not kind or (pictures and kind in (media.IMAGES, media.MEDIA)):
                continue
            way = media.way() if reader is None and kind == media.IMAGES else ""
            raise Refused(
                f"with {kind}",
                f"field {name!r} has {kind}, which the model is not shown; list it in data.ignore if only rewards "
                f"need it{way}",
            )
        return value, pictures


def _read(read: Callable[[Any], T], value: Any, field: str, what: str) -> T:
    try:
        return read(value)
    except ValueError as error:
        kind = media.kind_in_messages(value) or f"{what} that cannot be read"
        raise Refused(f"with {kind}", f"field {field!r}: {error}") from error


def _read_options(value: Any) -> Mapping[str, Any]:
    """A row's own arguments of the chat template: an object, or JSON text of one. Raises ValueError."""
    options = parsed(value) or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"got {short_repr(value)}, wanted an object; list the field in data.ignore if it is another")
    return options


# ---- from [data] -----------------------------------------------------------------------------------------------------


PARTS = "reward"  # under eval/, where each source has a place too
GENERATED = {"sort-digits": SortDigits}


def load_prompts(
    data: DataConfig,
    *,
    seed: int,
    notify: Callable[[str], None] | None = None,
    whole: bool = True,
    given: Rows | None = None,
    pictures: PictureReader | None = None,
) -> PromptSource:
    """Load the prompts and check every row; `notify` gets a line now and then about how many are read. Unless these are
    the `whole` data of a run, they may lack chats that `data.system` is for. `given` are rows in place of
    `data.source`'s. `pictures` finds those of rows. Raises ConfigError for bad settings, DataError for bad files."""
    load = partial(_load, data=data, seed=seed, notify=notify, pictures=pictures)
    if data.sources:
        source = _mixed(data, load)
    else:
        alone = DataSource(source=data.source, split=data.split, subset=data.subset)
        source = load(alone, setting="data.source", given=given)
    if whole:
        _require_chat(source, "data.system", data.system)
    return source


def require_source(source: str, *, setting: str = "data.source") -> None:
    """Raise ConfigError if a source is neither generated nor a path, DataError if it cannot be read; nothing
    of it is read."""
    if source in GENERATED or is_pattern(source):
        return
    if not source or (not os.path.exists(source) and Path(source).suffix not in known_suffixes()):
        near = did_you_mean(source, GENERATED) or did_you_mean_path(source)
        known = f"{', '.join(GENERATED)}, or the path of {PATHS}"
        raise ConfigError(f"{setting}: unknown source {source!r}; known: {known}{near}")
    try:
        os.stat(source)
    except OSError as error:
        raise DataError(
            f"{setting}: cannot read {source}: {error.strerror}; expected {PATHS}{did_you_mean_path(source)}"
        ) from error


def _require_chat(source: PromptSource, setting: str, system: str | None) -> None:
    if system and not source.chat:
        raise ConfigError(
            f"{setting}: used only for chats, and no prompt is one; set data.chat=true, or remove {setting}"
        )


def _mixed(data: DataConfig, load: Callable[..., PromptSource]) -> PromptSource:
    if data.source not in ("", fields(type(data)).source.default):
        raise ConfigError(f"data.sources: cannot be combined with data.source={data.source!r}; remove one of the two")
    sources: dict[str, PromptSource] = {}
    for number, each in enumerate(data.sources):
        if each.called in sources:
            raise ConfigError(f"data.sources: two sources are named {each.called!r}; give each a different name")
        if each.called == PARTS:
            raise ConfigError(
                f"data.sources: eval/{PARTS} has the parts of rewards; give source {PARTS!r} another name"
            )
        sources[each.called] = load(each, setting="data.sources")
        _require_chat(sources[each.called], f"data.sources[{number}].system", each.system)
    return MixedPrompts(sources, {each.called: each.weight for each in data.sources})


def _load(
    source: DataSource,
    *,
    setting: str,
    data: DataConfig,
    seed: int,
    notify: Callable[[str], None] | None,
    pictures: PictureReader | None,
    given: Rows | None = None,
) -> PromptSource:
    """One source, with the settings of `data` that it does not have itself."""
    system = data.system if source.system is None else source.system
    if given is None and source.source in GENERATED:
        return GENERATED[source.source](held_out=data.held_out, seed=seed, chat=data.chat, system=system)
    prompt_key, answer_key = source.prompt_key or data.prompt_key, source.answer_key or data.answer_key
    if given is None:
        require_source(source.source, setting=setting)
        given = open_rows(
            source.source,
            split=source.split,
            subset=source.subset,
            common=(data.split, data.subset),
            texts=(prompt_key, answer_key),
        )
    return RowPrompts(
        given,
        prompt_key=prompt_key,
        answer_key=answer_key,
        held_out=data.held_out,
        seed=seed,
        answers=answer_key != fields(type(data)).answer_key.default,
        tools_key=data.tools_key,
        chat=data.chat,
        system=system,
        ignore=data.ignore,
        skip=data.refused == "skip",
        pictures=pictures,
        notify=notify,
    )
