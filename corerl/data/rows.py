"""Prompts from rows: all are checked at once, each is read again when it is taken."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from corerl.data.chat import Messages, parsed, read_messages, read_tools, readable, without_nulls
from corerl.data.digests import digest, digest_of_text, held_out_order
from corerl.data.files import BATCH, Refused, Rows
from corerl.data.prompts import Prompt, PromptSource, split
from corerl.errors import DataError
from corerl.messages import did_you_mean, short_repr

EVERY = 10.0  # seconds between two lines about how many rows are read, and before the first
SHOWN = 60  # characters of a value in a message
OPTIONS = "chat_template_kwargs"  # the field with a row's own arguments of the chat template
# Names of fields with pictures, sound or video in published data sets, such as `images`, `image_1` and `audio_path`.
MEDIA = re.compile(
    r"(image|img|picture|photo|audio|waveform|video)s?(_?\d+|_(path|file|url|uri|byte|data|base64)s?)?", re.IGNORECASE
)
T = TypeVar("T")


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
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """`answers`: some row must have one. `chat`: texts become chats, which may have tools. `system` begins every
        chat that has no system message. `ignore`: fields that the model need not be shown. `skip`: leave out rows that
        cannot be shown to it. `notify` gets a line now and then about how many rows are read."""
        self._rows = rows
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._tools_key = tools_key
        self.chat = self._chat = chat
        self._system = system
        self._ignored = {prompt_key, answer_key, tools_key, *ignore}
        self._options_key = "" if OPTIONS in ignore else OPTIONS
        digests, asked, left_out = array("Q"), array("Q"), list[int]()  # the last one: numbers of rows
        first_refused, answered, noticed = "", False, time.monotonic()
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
                first_refused = first_refused or f"{where}: {error}"
                continue
            self.chat |= bool(prompt.messages)
            answered |= bool(prompt.answer)
            digests.append(digest(without_nulls(row), prompt_key, answer_key, tools_key))
            asked.append(digest_of_text(prompt.text))
        size = len(digests)
        self._numbers = np.delete(np.arange(size + len(left_out)), left_out) if left_out else None  # [n] of their rows
        of = f"{len(left_out)} of {size + len(left_out)} rows of {rows.name}"
        if not size:
            raise DataError(f"data.source: {of} cannot be shown to the model; the first: {first_refused}")
        if left_out:
            self.notices += (
                f"data: {of} are skipped, because they cannot be shown to the model; the first: {first_refused}",
            )
        if not answered:
            has = f"the first one has: {', '.join(self.prompt(0).fields)}"
            line = (
                f"data.answer_key: none of the {size} prompts of {rows.name} has an answer under {answer_key!r}; {has}"
            )
            if answers:
                raise DataError(f"{line}{did_you_mean(answer_key, self.prompt(0).fields)}")
            self.notices += (line,)
        seen, self.asked = np.array(digests, dtype=np.uint64), np.array(asked, dtype=np.uint64)
        self.divide([split(seen, held_out_order(seen, seed), held_out=held_out, name=rows.name)])

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
            raise Refused(f"got {short_repr(row, SHOWN)}, expected a JSON object with the field {key!r}")
        if key not in row:
            raise Refused(
                f"no field {key!r}; it has: {', '.join(row) or 'none'}{did_you_mean(key, row)}; set data.prompt_key"
            )
        known = without_nulls if self._rows.columnar else (lambda held: held)
        for name, held in row.items():
            if (
                MEDIA.fullmatch(name)
                and name not in self._ignored
                and not isinstance(held, int | float)
                and known(held)
            ):
                raise Refused(
                    f"field {name!r} has pictures, sound or video, which the model is not shown; list it in data.ignore"
                    " if only rewards need it"
                )
        value = row[key]
        if not isinstance(value, str | list) or not value:
            raise Refused(
                f"field {key!r} is {short_repr(value, SHOWN)}, expected a non-empty string or a list of messages"
            )
        messages: Messages = ()
        tools: Messages = ()
        options: Mapping[str, Any] = {}
        if isinstance(value, list):
            messages = _read(read_messages, known(value), key)
        if messages or self._chat:
            tools = _read(read_tools, known(row.get(self._tools_key)), self._tools_key)
            options = _read(_read_options, known(row.get(self._options_key)), OPTIONS)
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
        )
        return prompt.as_chat(system=self._system) if messages or self._chat else prompt


def _read(read: Callable[[Any], T], value: Any, field: str) -> T:
    try:
        return read(value)
    except ValueError as error:
        raise Refused(f"field {field!r}: {error}") from error


def _read_options(value: Any) -> Mapping[str, Any]:
    """A row's own arguments of the chat template: an object, or JSON text of one. Raises ValueError."""
    options = parsed(value) or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"got {short_repr(value)}, wanted an object; list the field in data.ignore if it is another")
    return options
