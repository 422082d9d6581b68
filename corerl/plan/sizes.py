"""Which settings may change while a run goes on: the sizes, layouts and backends of its groups."""

from __future__ import annotations

import re
from collections.abc import Sequence

from corerl.config.load import as_config
from corerl.config.schema import Config
from corerl.errors import ConfigError

REPLICAS = "rollout.replicas"
OF_RANKS = re.compile(r"roles\.\w+\.(ranks|backend|options(\..+)?)|backend\.name|backends\..+")


def with_other_sizes(config: Config, overrides: Sequence[str]) -> Config:
    """The config with overrides, such as "roles.actor.ranks=4". Raises ConfigError for other settings, and as
    `load_config` does."""
    changed = as_config(config, overrides)  # first: it knows what a misspelt key was meant to be
    keys = [override.partition("=")[0].strip() for override in overrides]
    refused = [key for key in keys if key != REPLICAS and not OF_RANKS.fullmatch(key)]
    if refused:
        raise ConfigError(
            "\n".join(
                f"{key}: does not change while a run goes on; roles.ROLE.ranks, .backend and .options, backend.name, "
                f"[backends.NAME] and {REPLICAS} do"
                for key in refused
            )
        )
    return changed
