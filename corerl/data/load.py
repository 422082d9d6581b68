"""Load a run's prompts from `[data]`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from attrs import fields

from corerl.config.schema import DataConfig, DataSource
from corerl.data.chat import ChatPrompts
from corerl.data.files import JSONL, LOADERS, PATHS, Rows, is_pattern, open_rows
from corerl.data.mixture import MixedPrompts
from corerl.data.prompts import PromptSource, SortDigits
from corerl.data.rows import RowPrompts
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean, did_you_mean_path

PARTS = "reward"  # under eval/, where each source has a place too
GENERATED = {"sort-digits": SortDigits}


def load_prompts(
    data: DataConfig,
    *,
    seed: int,
    notify: Callable[[str], None] | None = None,
    whole: bool = True,
    given: Rows | None = None,
) -> PromptSource:
    """Load the prompts and check every row; `notify` gets a line now and then about how many are read. Unless these are
    the `whole` data of a run, they may lack chats and tools that `data` has settings for. `given` are rows in place of
    `data.source`'s. Raises ConfigError for bad settings, DataError for bad files."""
    loading = _Loading(data, seed, notify)
    if data.sources:
        source = loading.mixed()
    else:
        alone = DataSource(source=data.source, split=data.split, subset=data.subset)
        source = loading.source(alone, setting="data.source", given=given)
    if not whole:
        return source
    _require_chat(source, "data.system", data.system)
    # A task may do without the default field, but not without one that its config names; a part of a mix may.
    named = data.tools_key not in ("", fields(type(data)).tools_key.default)
    if named and loading.read and not any(each.has(data.tools_key) for each in loading.read):
        loading.read[0].require(data.tools_key, setting="data.tools_key")
    return source


def require_source(source: str, *, setting: str = "data.source") -> None:
    """Raise ConfigError if a source is neither generated nor a path, DataError if it is none that can be read; nothing
    of it is read."""
    if source in GENERATED or is_pattern(source):
        return
    if not source or (not os.path.exists(source) and Path(source).suffix not in (JSONL, *LOADERS)):
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


class _Loading:
    """Loads the sources of one config."""

    def __init__(self, data: DataConfig, seed: int, notify: Callable[[str], None] | None) -> None:
        self._data, self._seed, self._notify = data, seed, notify
        self.read: list[RowPrompts] = []  # of the sources that have rows

    def mixed(self) -> PromptSource:
        data = self._data
        if data.source not in ("", fields(type(data)).source.default):
            raise ConfigError(
                f"data.sources: cannot be combined with data.source={data.source!r}; remove one of the two"
            )
        sources: dict[str, PromptSource] = {}
        weights: dict[str, float] = {}
        for number, each in enumerate(data.sources):
            name = each.called
            if name in sources:
                raise ConfigError(f"data.sources: two sources are named {name!r}; give each a different name")
            if name == PARTS:
                raise ConfigError(
                    f"data.sources: eval/{name} has the parts of rewards; give source {name!r} another name"
                )
            weights[name] = each.weight
            sources[name] = self.source(each, setting="data.sources")
            _require_chat(sources[name], f"data.sources[{number}].system", each.system)
        return MixedPrompts(sources, weights)

    def source(self, source: DataSource, *, setting: str, given: Rows | None = None) -> PromptSource:
        data = self._data
        found: PromptSource
        if given is None and source.source in GENERATED:
            found = GENERATED[source.source](held_out=data.held_out, seed=self._seed)
        else:
            if given is None:
                require_source(source.source, setting=setting)
                common = (data.split, data.subset)
                given = open_rows(
                    source.source, split=source.split, subset=source.subset, common=common, texts=self._keys(source)
                )
            found = self._prompts(given, source)
        system = data.system if source.system is None else source.system
        wraps = data.chat or (system and found.chat)
        return ChatPrompts(found, system=system, texts=not data.chat) if wraps else found

    def _keys(self, source: DataSource) -> tuple[str, str]:
        """The fields of a source with prompts and answers."""
        return source.prompt_key or self._data.prompt_key, source.answer_key or self._data.answer_key

    def _prompts(self, rows: Rows, source: DataSource) -> RowPrompts:
        data = self._data
        prompt_key, answer_key = self._keys(source)
        found = RowPrompts(
            rows,
            prompt_key=prompt_key,
            answer_key=answer_key,
            held_out=data.held_out,
            seed=self._seed,
            tools_key=data.tools_key,
            chat=data.chat,
            ignore=data.ignore,
            skip=data.refused == "skip",
            notify=self._notify,
        )
        if answer_key != fields(type(data)).answer_key.default:
            found.require(answer_key, setting="data.answer_key")
        self.read.append(found)
        return found
