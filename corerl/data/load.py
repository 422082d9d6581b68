"""Load a run's prompts from `[data]`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import fields

from corerl.data.chat import ChatPrompts
from corerl.data.mixture import MixedPrompts
from corerl.data.prompts import PromptSource, SortDigits
from corerl.data.reports import NO_REPORTS, Reports
from corerl.data.rows import RowPrompts, open_rows
from corerl.errors import ConfigError
from corerl.messages import did_you_mean

if TYPE_CHECKING:
    from corerl.config.schema import DataConfig

PARTS = "reward"  # under eval/, where each source has a place too
GENERATED = {"sort-digits": SortDigits}
KNOWN = (
    f"{', '.join(GENERATED)}, or the path of a .jsonl or .parquet file, a directory of .parquet files, or a data set "
    "saved by `save_to_disk`"
)


def load_prompts(data: DataConfig, *, seed: int, reports: Reports = NO_REPORTS) -> PromptSource:
    """Load the prompts and check every row, with `reports` of how far that is. Raises ConfigError for bad settings,
    DataError for bad files."""
    each_own = {f"data.sources[{index}].system": each.system for index, each in enumerate(data.sources)}
    for setting, system in {"data.system": data.system, **each_own}.items():
        if system and not data.chat:
            raise ConfigError(f"{setting}: used only with data.chat=true; set that, or remove {setting}")
    return _mixed(data, seed, reports) if data.sources else _source(data, data.source, seed=seed, reports=reports)


def _mixed(data: DataConfig, seed: int, reports: Reports) -> PromptSource:
    if data.source != fields(type(data)).source.default:
        raise ConfigError(f"data.sources: cannot be combined with data.source={data.source!r}; remove one of the two")
    sources: dict[str, PromptSource] = {}
    weights: dict[str, float] = {}
    for each in data.sources:
        name = each.name or Path(each.source).stem
        if name in sources:
            raise ConfigError(f"data.sources: two sources are named {name!r}; give each a different name")
        if name == PARTS:
            raise ConfigError(f"data.sources: eval/{name} has the parts of rewards; give source {name!r} another name")
        weights[name] = each.weight
        sources[name] = _source(
            data,
            each.source,
            prompt_key=each.prompt_key,
            answer_key=each.answer_key,
            system=each.system,
            setting="data.sources",
            seed=seed,
            reports=reports,
        )
    return MixedPrompts(sources, weights)


def _source(
    data: DataConfig,
    source: str,
    *,
    prompt_key: str = "",
    answer_key: str = "",
    system: str | None = None,
    setting: str = "data.source",
    seed: int,
    reports: Reports,
) -> PromptSource:
    rows = _rows(
        data, source, prompt_key=prompt_key, answer_key=answer_key, setting=setting, seed=seed, reports=reports
    )
    return ChatPrompts(rows, system=data.system if system is None else system) if data.chat else rows


def _rows(
    data: DataConfig, source: str, *, prompt_key: str, answer_key: str, setting: str, seed: int, reports: Reports
) -> PromptSource:
    """The prompts as the source has them."""
    if source in GENERATED:
        return GENERATED[source](held_out=data.held_out, seed=seed)
    path = Path(source)
    if not source or (not os.path.exists(path) and path.suffix not in (".jsonl", ".parquet")):
        raise ConfigError(f"{setting}: unknown source {source!r}; known: {KNOWN}{did_you_mean(source, GENERATED)}")
    answer_key = answer_key or data.answer_key
    return RowPrompts(
        open_rows(path, reports),
        prompt_key=prompt_key or data.prompt_key,
        answer_key=answer_key,
        # A task may do without the default field, but not without one that its config names.
        need_answers=answer_key != fields(type(data)).answer_key.default,
        held_out=data.held_out,
        seed=seed,
        tools_key=data.tools_key,
        chat=data.chat,
        reports=reports,
    )
