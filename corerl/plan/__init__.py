"""From a config to the plan of its run: everything that can be known, and checked, before the first process."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.plan.plan import PlanReady as PlanReady
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
