"""Plan smaller groups for the devices that are left of a run's."""

from __future__ import annotations

from collections.abc import Sequence

from corerl.errors import ConfigError, UserError
from corerl.messages import one_line
from corerl.plan import ENGINES, Plan
from corerl_elastic import sizes as of_plans
from corerl_elastic.places import Places


def fewer(plan: Plan, places: Places, groups: Sequence[str]) -> Plan:
    """A plan for as many processes of each group as devices are left for. Devices that nobody uses go to groups
    that have lost some, first to those that have none. One that still has none gets some of the group that has
    most: as many as it had, but half of them at most. Raises UserError if there is no such plan."""
    placement = plan.processes.placement
    sizes = {name: len(places.pool[name]) for name in groups}
    widths = {name: placement.widths.get(name, 1) for name in groups}
    pools = {name: name if name in placement.separate else "" for name in groups}  # "" is of those that share theirs
    bundles = {pool: places.left(name, separate=placement.separate) for name, pool in pools.items()}
    had, least = dict.fromkeys(bundles, 0), dict.fromkeys(bundles, 0)
    for name, pool in pools.items():
        had[pool], least[pool] = max(had[pool], sizes[name] * widths[name]), max(least[pool], widths[name])
    unused = places.unused
    for wanted in (least, had):
        for pool, count in bundles.items():
            given = max(0, min(unused, wanted[pool] - count))
            bundles[pool] += given
            unused -= given
    for pool in [pool for pool, count in bundles.items() if count < least[pool]]:
        giver = max(bundles, key=lambda each: bundles[each])
        given = min(had[pool] - bundles[pool], bundles[giver] // 2)
        bundles[pool] += given
        bundles[giver] -= given
    for name, size in sizes.items():
        left = bundles[pools[name]] // widths[name]
        if left < size:
            plan = _largest(plan, of_plans.REPLICAS if name == ENGINES else f"roles.{name}.ranks", size, left)
    return plan


def _largest(plan: Plan, setting: str, now: int, left: int) -> Plan:
    """The plan with as much of the setting as it can have, `left` at most. Raises ConfigError if it can have none."""
    refused: UserError | None = None
    for size in range(left, 0, -1):
        try:
            return of_plans.resized(plan, [f"{setting}={size}"])
        except UserError as error:
            refused = refused or error
    why = f", where it cannot be that or less: {one_line(refused)}" if refused is not None else ""
    raise ConfigError(f"{setting}: devices are left for {left} of {now}{why}") from refused
