"""Check the names of plugins and rewards in a config, without importing what they name."""

from __future__ import annotations

from collections.abc import Iterator

from corerl.config.schema import Config
from corerl.errors import ConfigError, PluginError
from corerl.plan.resolve import selected
from corerl.plugin.registry import locate
from corerl.rollout.rewards.lookup import require_known


def wrong_names(config: Config) -> Iterator[str]:
    """A line for each name of a plugin or reward that names nothing; names that are empty are left out."""
    for each in selected(config):
        if each.name:
            try:
                locate(each.kind, each.name)
            except PluginError as error:
                yield f"{each.path}: {error.message}"
    functions = {f"reward.functions[{place}]": each.name for place, each in enumerate(config.reward.functions)}
    for table, name in (functions or {"reward": config.reward.name}).items():
        if name:
            try:
                require_known(name, table=table)
            except ConfigError as error:
                yield error.message
