"""Scalers that a user might write, named in a config as 'plugins.elastic.tests.scalers:down_and_up'."""

from __future__ import annotations

from corerl_elastic import Sizing


def down_and_up(sizing: Sizing) -> dict[str, int]:
    """One rank and one engine more or less, at other steps each."""
    ranks, replicas = "roles.actor.ranks", "rollout.replicas"
    return {1: {ranks: 1}, 2: {ranks: 2, replicas: 2}, 4: {replicas: 1}}.get(sizing.step, {})
