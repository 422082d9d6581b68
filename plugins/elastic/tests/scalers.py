"""Scalers that a user might write, named in a config as 'plugins.elastic.tests.scalers:down_and_up'."""

from __future__ import annotations

from corerl_elastic import Sizing


def down_and_up(sizing: Sizing) -> dict[str, int]:
    """One rank and one engine more or less, at other steps each."""
    ranks, replicas = "roles.actor.ranks", "rollout.replicas"
    return {1: {ranks: 1}, 2: {ranks: 2, replicas: 2}, 4: {replicas: 1}}.get(sizing.step, {})


def ranks_down_and_up(sizing: Sizing) -> dict[str, int]:
    """Of one role, then of the other, and of both at once."""
    actor, critic = "roles.actor.ranks", "roles.critic.ranks"
    wanted = {1: {actor: 1}, 2: {critic: 1}, 3: {actor: 2, critic: 2}}.get(sizing.step, {})
    return {name: ranks for name, ranks in wanted.items() if name in sizing.sizes}
