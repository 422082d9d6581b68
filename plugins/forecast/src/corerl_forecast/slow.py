"""Slow paths that a run takes on GPUs: those of backends' specs, and float32."""

from __future__ import annotations

from collections.abc import Iterator

from corerl.config.schema import ClusterInfo
from corerl.models.size import size_of
from corerl.plan.plan import PlanReady
from corerl.plan.resolve import place_of, role_options
from corerl.plugin.spec import SlowPath

# Of whole steps, of `python -m benchmarks.slow_paths` on an H100: docs/models.md has the table of all.
FLOAT32 = "a step takes twice as long"


def slow_paths(plan: PlanReady) -> list[str]:
    """One line for each slow path of a role, with its price and what avoids it."""
    lines = []
    for role, own in plan.processes.roles.items():
        found = [
            *slow_precision(own.cluster, asked=plan.asked.train_of(role).precision == "float32"),
            *own.backend.spec.slow(
                role_options(plan.config, role, own.backend), own.cluster, size_of(plan.built[role])
            ),
        ]
        for each in found:
            place = place_of(each, own.backend, config=plan.config, role=role)
            lines.append(f"{place}: {each.text}; {each.price}; {each.instead}")
    return list(dict.fromkeys(lines))


def slow_precision(cluster: ClusterInfo, *, asked: bool) -> Iterator[SlowPath]:
    """What float32 costs on GPUs. Unless it was `asked` for, nothing better is there."""
    if cluster.train is not None and cluster.train.precision == "float32":
        yield SlowPath(
            path=".train.precision",
            text="float32 has neither a kernel for packed attention nor the fast matrix products of half precision",
            price=FLOAT32,
            instead="set it to 'bfloat16'" if asked else "bfloat16, which the GPU or the backend lacks, would avoid it",
        )
