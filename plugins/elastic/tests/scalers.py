"""Scalers that a user might write, named in a config as 'plugins.elastic.tests.scalers:up_and_down'."""

from __future__ import annotations

from corerl_elastic import Sizing


def up_and_down(sizing: Sizing) -> dict[str, int]:
    """One rank more and one engine less, once."""
    return {"roles.actor.ranks": 2, "rollout.replicas": 1} if sizing.step == 3 else {}
