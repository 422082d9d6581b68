"""Plan a run again with other sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import evolve

from corerl.config import Config, as_config
from corerl.errors import ConfigError
from corerl.plan import Plan, make_plan

REPLICAS = "rollout.replicas"
OF_RANKS = re.compile(r"roles\.\w+\.(ranks|backend|options(\..+)?)|backend\.name|backends\..+")


def with_other_sizes(config: Config, overrides: Sequence[str]) -> Config:
    """The config with overrides of what may change while a run goes on, such as "roles.actor.ranks=4". Raises
    ConfigError for other settings, and as `load_config` does."""
    changed = as_config(config, overrides)  # first: it knows what a misspelt key was meant to be
    keys = [override.partition("=")[0].strip() for override in overrides]
    if refused := [key for key in keys if key != REPLICAS and not OF_RANKS.fullmatch(key)]:
        raise ConfigError(
            "\n".join(
                f"{key}: does not change while a run goes on; roles.ROLE.ranks, .backend and .options, backend.name, "
                f"[backends.NAME] and {REPLICAS} do"
                for key in refused
            )
        )
    return changed


def resized(plan: Plan, overrides: Sequence[str]) -> Plan:
    """The plan of the same run with other sizes. Its state comes from the ranks that run: the checkpoint that these
    began with may be gone by now."""
    given = with_other_sizes(plan.given, overrides)
    found = make_plan(evolve(given, checkpoint=evolve(given.checkpoint, resume="never")), starting=False)
    checkpoint = {**found.record["checkpoint"], "resume": given.checkpoint.resume}
    return evolve(found, record={**found.record, "checkpoint": checkpoint}, given=given)
