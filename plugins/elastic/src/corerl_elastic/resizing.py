"""Resize a run's groups as overrides of its config say, one group after the other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from corerl.driver.groups import require_same_surroundings
from corerl.plan.plan import Plan
from corerl.plan.settle import REPLICAS
from corerl.plugin import RunControl

OF_ROLE = re.compile(r"\s*roles\.(\w+)\.")


def resize(run: RunControl, overrides: Sequence[str], changed: list[str]) -> None:
    """Change the groups as the overrides of the config say; adds a line to `changed` for each that has. Engines that
    are to end do so first, those to come start last: so devices can pass from one side to the other.

    Raises UserError or ResizeFailed for the first group that could not be changed, which then is as before; WorkerDied
    if ranks die."""
    before = run.plan.processes
    wanted = run.replan(overrides).processes  # raises for all that is wrong with it
    engines = [each for each in overrides if each.partition("=")[0].strip() == REPLICAS]
    parts = _by_role([each for each in overrides if each not in engines])
    ending = wanted.engine is not None and len(wanted.engine.assignments) < run.sizes[REPLICAS]
    plans: list[Plan] = []  # one after the other, so that the last one made is always of the groups as they are
    for part in [engines, *parts] if ending else [*parts, engines]:
        if part:
            plans.append((plans[-1] if plans else run.plan).resized(part))
            require_same_surroundings(before, plans[-1].processes)
    for plan in plans:
        changed += run.apply(plan)


def _by_role(overrides: Sequence[str]) -> list[list[str]]:
    """Overrides that are each of one role, by role; all together if any is of several."""
    names = [OF_ROLE.match(each) for each in overrides]
    found: dict[str, list[str]] = {}
    for override, name in zip(overrides, names, strict=True):
        found.setdefault(name[1] if name is not None and all(names) else "", []).append(override)
    return list(found.values())
