"""Load a run's prompts from `[data]`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from attrs import fields

from corerl.config.schema import DataConfig, DataSource
from corerl.data.files import JSONL, LOADERS, PATHS, Rows, is_pattern, open_rows
from corerl.data.prompts import MixedPrompts, PromptSource, SortDigits
from corerl.data.rows import RowPrompts
from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean, did_you_mean_path
from corerl.pictures import PictureReader

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
    if data.sources:
        source = _mixed(data, seed, notify, pictures)
    else:
        alone = DataSource(source=data.source, split=data.split, subset=data.subset)
        source = _load(alone, data, seed, notify, setting="data.source", given=given, pictures=pictures)
    if whole:
        _require_chat(source, "data.system", data.system)
    return source


def require_source(source: str, *, setting: str = "data.source") -> None:
    """Raise ConfigError if a source is neither generated nor a path, DataError if it cannot be read; nothing
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


def _mixed(
    data: DataConfig, seed: int, notify: Callable[[str], None] | None, pictures: PictureReader | None
) -> PromptSource:
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
        sources[each.called] = _load(each, data, seed, notify, setting="data.sources", pictures=pictures)
        _require_chat(sources[each.called], f"data.sources[{number}].system", each.system)
    return MixedPrompts(sources, {each.called: each.weight for each in data.sources})


def _load(
    source: DataSource,
    data: DataConfig,
    seed: int,
    notify: Callable[[str], None] | None,
    *,
    setting: str,
    given: Rows | None = None,
    pictures: PictureReader | None = None,
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
