"""Plan the ranks of one role alone, for a loop other than CoreRL's."""

from __future__ import annotations

from attrs import evolve, frozen

from corerl.cluster.placement import Placement, arrange
from corerl.config.schema import Config
from corerl.errors import ConfigError
from corerl.models.build import stored_buffers
from corerl.models.config import experts, hf_config
from corerl.models.layout import choose_layout
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.devices import has_bfloat16, resolve_device
from corerl.plan.environment import environment_of, process_environment
from corerl.plan.imports import imports_of
from corerl.plan.model_files import built, require_weights
from corerl.plan.resolve import has_value_head, resolve_tables, settle_algorithm
from corerl.plan.roles import RolePlan, plan_role
from corerl.plan.settle import with_absolute_paths, with_precisions, with_recomputation


@frozen(kw_only=True)
class GroupPlan:
    role: RolePlan
    placement: Placement
    address: str  # of a running Ray cluster; empty starts one


def plan_group(config: Config, role: str, *, resume: str) -> GroupPlan:
    """Resolve and check what a config says of a role. Raises UserError with a line for each problem found."""
    imports_of(config)  # raises where nothing must be imported
    config = resolve_tables(settle_algorithm(with_absolute_paths(config)))
    if role not in config.chosen_roles:
        raise ConfigError(f"roles.{role}: missing; add it, or start one of {', '.join(config.chosen_roles)}")
    device = resolve_device(config.cluster.device, address=config.cluster.address)
    config = with_precisions(config, device, bfloat16=has_bfloat16(config.cluster, device))
    config = with_recomputation(config, {})
    own = config.model_of(role)
    hf = hf_config(own)
    model = built(hf, value_head=has_value_head(config, role))
    if own.path and not resume:
        require_weights(own.path, model, hf)
    plan = plan_role(
        role,
        config,
        experts=experts(hf),
        buffer=next(iter(stored_buffers(model)), ""),
        device=device,
        run_dir="",
        resume=resume,
        model=hf.to_dict(),
        layout=choose_layout(model, config.train_of(role).layout).name,
    )
    common = process_environment(cluster=config.cluster, device=device, transport=config.weights.transport)
    environment = environment_of(plan.backend.name, plan.environment, cluster=config.cluster, common=common)
    return GroupPlan(
        role=evolve(plan, environment=environment, objective=plan_algorithm(config).objectives[role]),
        placement=arrange(
            {role: len(plan.assignments)},
            cpus=plan.resources.cpus,
            gpus=plan.resources.gpus,
            resources=config.cluster.resources,
        ),
        address=config.cluster.address,
    )
