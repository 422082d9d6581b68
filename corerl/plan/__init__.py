"""From a config to the plan of its run: everything that can be known, and checked, before the first process."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.plan.data import RolloutPlan as RolloutPlan
    from corerl.plan.group import plan_group as plan_group
    from corerl.plan.make import make_plan as make_plan
    from corerl.plan.models import RoleModel as RoleModel
    from corerl.plan.plan import Plan as Plan
    from corerl.plan.plan import PlanReady as PlanReady
    from corerl.plan.processes import ENGINES as ENGINES
    from corerl.plan.residency import FORWARD as FORWARD
    from corerl.plan.residency import REST as REST
    from corerl.plan.residency import UPDATE as UPDATE
    from corerl.plan.residency import train_stage as train_stage
    from corerl.plan.resolve import filled_in as filled_in
    from corerl.plan.resolve import ignored_tables as ignored_tables
    from corerl.plan.resolve import place_of as place_of
    from corerl.plan.resolve import role_options as role_options
    from corerl.plan.resolve import selected as selected
    from corerl.rollout.evaluation import EvalSet as EvalSet
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
