"""Load a run's prompts from `[data]`."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import fields

from corerl.config.schema import DataConfig, DataSource
from corerl.data.chat import ChatPrompts
from corerl.data.mixture import MixedPrompts
from corerl.data.prompts import PromptSource, SortDigits
from corerl.data.reports import NO_REPORTS, Reports
from corerl.data.rows import PATHS, RowPrompts, Rows, open_rows, unreadable
from corerl.data.splits import find, is_pattern
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean, did_you_mean_path

PARTS = "reward"  # under eval/, where each source has a place too
FILES = (".jsonl", ".parquet")
GENERATED = {"sort-digits": SortDigits}


def load_prompts(
    data: DataConfig, *, seed: int, reports: Reports = NO_REPORTS, whole: bool = True, given: Rows | None = None
) -> PromptSource:
    """Load the prompts and check every row, with `reports` of how far that is. Unless these are the `whole` data of a
    run, they may lack chats and tools that `data` has settings for. `given` are rows in place of `data.source`'s.
    Raises ConfigError for bad settings, DataError for bad files."""
    read: list[RowPrompts] = []
    alone = DataSource(source=data.source, split=data.split, subset=data.subset)
    source = (
        _mixed(data, seed, reports, read)
        if data.sources
        else _source(data, alone, seed=seed, reports=reports, read=read, given=given)
    )
    if not whole:
        return source
    _require_chat(source, "data.system", data.system)
    # A task may do without the default field, but not without one that its config names; a part of a mix may.
    named = data.tools_key not in ("", fields(type(data)).tools_key.default)
    if named and read and not any(each.has(data.tools_key) for each in read):
        read[0].require(data.tools_key, setting="data.tools_key")
    return source


def require_source(source: str, *, setting: str = "data.source") -> None:
    """Raise ConfigError if a source is neither generated nor a path, DataError if it is none that can be read; nothing
    of it is read."""
    if source in GENERATED or is_pattern(source):
        return
    if not source or (not os.path.exists(source) and Path(source).suffix not in FILES):
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


def _mixed(data: DataConfig, seed: int, reports: Reports, read: list[RowPrompts]) -> PromptSource:
    if data.source not in ("", fields(type(data)).source.default):
        raise ConfigError(f"data.sources: cannot be combined with data.source={data.source!r}; remove one of the two")
    sources: dict[str, PromptSource] = {}
    weights: dict[str, float] = {}
    for number, each in enumerate(data.sources):
        name = each.called
        if name in sources:
            raise ConfigError(f"data.sources: two sources are named {name!r}; give each a different name")
        if name == PARTS:
            raise ConfigError(f"data.sources: eval/{name} has the parts of rewards; give source {name!r} another name")
        weights[name] = each.weight
        sources[name] = _source(data, each, setting="data.sources", seed=seed, reports=reports, read=read)
        _require_chat(sources[name], f"data.sources[{number}].system", each.system)
    return MixedPrompts(sources, weights)


def _source(
    data: DataConfig,
    source: DataSource,
    *,
    setting: str = "data.source",
    seed: int,
    reports: Reports,
    read: list[RowPrompts],
    given: Rows | None = None,
) -> PromptSource:
    """The source's prompts; rows of files that they come from are added to `read`."""
    if given is None:
        rows = _rows(data, source, setting=setting, seed=seed, reports=reports)
    else:
        rows = _prompts(given, data, source, seed=seed, reports=reports)
    if isinstance(rows, RowPrompts):
        read.append(rows)
    system = data.system if source.system is None else source.system
    return ChatPrompts(rows, system=system, texts=not data.chat) if data.chat or (system and rows.chat) else rows


def _rows(data: DataConfig, source: DataSource, *, setting: str, seed: int, reports: Reports) -> PromptSource:
    """The prompts as the source has them."""
    if source.source in GENERATED:
        return GENERATED[source.source](held_out=data.held_out, seed=seed)
    require_source(source.source, setting=setting)
    try:
        common = (data.split, data.subset)
        found = find(source.source, split=source.split, subset=source.subset, common=common)
    except OSError as error:
        raise unreadable(Path(error.filename or source.source), error) from error
    except ImportError as error:
        raise ConfigError(
            f"{setting}: reading {source.source} requires `datasets`, which is not installed; pip install "
            "'corerl[data]'"
        ) from error
    rows = _prompts(open_rows(found, source.source, reports), data, source, seed=seed, reports=reports)
    rows.notices = (found.notice, *rows.notices) if found.notice else rows.notices
    return rows


def _prompts(rows: Rows, data: DataConfig, source: DataSource, *, seed: int, reports: Reports) -> RowPrompts:
    answer_key = source.answer_key or data.answer_key
    found = RowPrompts(
        rows,
        prompt_key=source.prompt_key or data.prompt_key,
        answer_key=answer_key,
        held_out=data.held_out,
        seed=seed,
        tools_key=data.tools_key,
        chat=data.chat,
        ignore=data.ignore,
        skip=data.refused == "skip",
        reports=reports,
    )
    if answer_key != fields(type(data)).answer_key.default:
        found.require(answer_key, setting="data.answer_key")
    return found
