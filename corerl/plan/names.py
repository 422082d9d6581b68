"""Check what a config names, each by itself: plugins with their tables, rewards, functions, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from corerl.config.functions import imported
from corerl.config.schema import Config
from corerl.data.load import require_source
from corerl.errors import ConfigError, PluginConflict, PluginError, PluginNotFound, UserError
from corerl.plan.check import missing_directories
from corerl.plan.resolve import resolved_tables, selected
from corerl.plan.user_code import code_of, functions_of, rewards_of
from corerl.plugin.registry import Kind, load, locate
from corerl.rollout.rewards.lookup import require_known

Trial: TypeAlias = Callable[[Sequence[str], Sequence[tuple[Kind, str]]], Callable[[], None]]


def wrong_names(config: Config) -> Iterator[str]:
    """A line for each name of a plugin, reward, directory or source of prompts that names nothing; names that are empty
    are left out. Nothing is imported."""
    for each in selected(config):
        if each.name:
            try:
                locate(each.kind, each.name)
            except PluginError as error:
                yield f"{each.path}: {error.message}"
    for table, name in rewards_of(config).items():
        if name:
            try:
                require_known(name, table=table)
            except ConfigError as error:
                yield error.message
    yield from missing_directories(config)
    sources = [("data.sources", each.source) for each in config.data.sources] or [("data.source", config.data.source)]
    sources += [(f"eval.sets[{place}].source", each.source) for place, each in enumerate(config.eval.sets)]
    for setting, source in sources:
        if source:
            try:
                require_source(source, setting=setting)
            except UserError as error:
                yield error.message


def untried(modules: Sequence[str], plugins: Sequence[tuple[Kind, str]]) -> Callable[[], None]:
    return lambda: None


def wrong_apart(config: Config, *, trial: Trial = untried) -> Iterator[str]:
    """`wrong_names`, and a line for each plugin that cannot be loaded, each option that does not fit its plugin, and
    each function that cannot be imported: all that is wrong whatever the rest of the config says.

    `trial` begins to import these modules and plugins elsewhere, and returns what waits for that; nothing is imported
    here if that raises UserError."""
    yield from wrong_names(config)
    try:
        code = code_of(config)
        trial(code.modules, code.plugins)()
    except UserError as error:
        yield from error.message.splitlines()
        return
    for each in selected(config):
        try:
            load(each.kind, each.name)
        except PluginError as error:
            if not isinstance(error, (PluginNotFound, PluginConflict)):  # which `wrong_names` tells
                yield f"{each.path}: {error.message}"
    for _, line in resolved_tables(config)[1]:
        yield line
    for setting, name in functions_of(config).items():
        try:
            imported(name, setting=setting)
        except ConfigError as error:
            yield error.message
