"""Runs in a few words, for planning roles: no process, no model."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from corerl.config.schema import BackendChoice, Config, RoleChoice, RolesConfig
from corerl.plan.resolve import resolve_tables

FAKE = "tests.trainer.fakes:SPEC"


def config_for(backend: str = FAKE, *, ranks: int = 2, options: dict[str, Any] | None = None, **tables: Any) -> Config:
    """`tables` replace whole tables of the config; options are resolved."""
    config = Config(
        backend=BackendChoice(name=backend),
        backends={backend: options or {}},
        roles=RolesConfig(actor=RoleChoice(ranks=ranks)),
        extensions=(),
    )
    return resolve_tables(evolve(config, **tables))
