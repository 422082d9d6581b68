"""Under Ray, as in a run: a process for each rank, the group that drives them, and an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve

from corerl.config import ClusterInfo, structure
from corerl.errors import PluginIncompatible
from corerl.plugin import Kind
from corerl.plugin.registry import Loaded, scan
from corerl.plugin.transports import transport_named
from corerl_testing.compare import metrics_of
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal, require_near
from corerl_testing.subject import Subject
from corerl_testing.suite.test_errors import require_error
from corerl_testing.tolerances import ENGINE_LOGPROBS, GRAD_NORM, LOSS, Tolerance
from corerl_testing.wrappers import NAMES


@check("C36", level=4, builds_on=["C21", "C41"])
def test_an_engine_has_the_trainers_weights_after_each_update(
    subject: Subject, slots: Mapping[str, Any], loaded: Loaded
) -> None:
    from corerl_testing import groups

    own = [entry.name for entry in scan(Kind.TRANSPORTS) if entry.distribution == "corerl-transports"]
    transports = [name for name in own if loaded.spec.support(transport_named(name).capability).full]
    setup = subject.setup("qwen3-tied")
    with groups.launched(groups.plan_of(setup, subject.world_size, subject.directory), slots["actor"]) as group:
        init = group.init().result()
        require_equal("InitResult.optimizer_step", init.optimizer_step, 0)
        with groups.engine(setup, slots["engines"]) as fleet:
            for number in range(3):
                directory, transport = subject.directory / "weights", transports[number % len(transports)]
                arrived = groups.push(group, fleet, number + 1, transport=transport, directory=directory)
                # Whole, by the checksum of each bucket.
                require_equal(f"the answer of the engine to an update by {transport}", arrived, {"engine-0": ""})
                batch = groups.sampled(fleet, number)
                sampled = batch.columns["loss_mask"]
                versions = sorted(set(batch.columns["versions"][sampled].tolist()))
                require_equal("the list of versions that sampled", versions, [number + 1])
                found = groups.logprobs(group, setup, batch)[sampled]
                wanted = batch.columns["rollout_logprobs"][sampled]
                what = f"log-probs of the trainer after an update by {transport}, against the engine's,"
                require_near(what, found, wanted, Tolerance(0.0, ENGINE_LOGPROBS))
                result = groups.train(group, setup, number, batch)
                require(
                    result.applied and result.grad_norm > 0,
                    f"step {number} under Ray has applied={result.applied}, grad_norm={result.grad_norm}, expected a "
                    "step with a gradient",
                )
        group.shutdown()


@check("C37", level=4, builds_on=["C36"], ranks=[1])
def test_a_worker_with_another_version_of_the_backend_says_so(subject: Subject, slots: Mapping[str, Any]) -> None:
    from corerl_testing import groups

    plan = groups.plan_of(subject.setup("qwen3"), 1, subject.directory)
    (assignment,) = plan.assignments
    core, backend = assignment.origins
    other = evolve(assignment, origins=(core, evolve(backend, version="0.0.0.dev0")))
    with groups.launched(evolve(plan, assignments=(other,)), slots["actor"]) as group:
        with pytest.raises(PluginIncompatible, match=r"actor rank 0 .*, but the driver's is .*0\.0\.0\.dev0"):
            group.init().result()


@check("C38", level=4, builds_on=["C36"])
def test_a_killed_rank_ends_the_group_and_is_named(wrapped: Any, world_size: int) -> None:
    last = f"WorkerDied: actor rank {world_size - 1}: its process died during train"
    require_error("the group whose last rank was killed", wrapped.died, last)
    require("\n" not in wrapped.died, f"the error of a killed rank has several lines, expected one: {wrapped.died!r}")
    require_error("the next call of that group", wrapped.then, "WorkerDied: ")


@check("C39", level=4, builds_on=["C36"])
def test_the_environment_is_set_before_torch_is_imported(
    wrapped: Any, loaded: Loaded, world_size: int, options: Mapping[str, Any]
) -> None:
    from corerl_testing import groups

    own = structure(options, loaded.spec.config, path="")
    asked = loaded.spec.environment(own, ClusterInfo(device="cpu", ranks=world_size))
    for process in wrapped.processes:
        for name, value in {**groups.ENVIRONMENT, **asked}.items():
            require_equal(f"{name} in the process of a rank", process["env"].get(name), value)
        wanted = int({**groups.ENVIRONMENT, **asked}["OMP_NUM_THREADS"])
        # torch reads it on import, and only then; it uses no more threads than there are cores.
        threads = min(wanted, os.cpu_count() or 1)
        require_equal("the number of torch's threads, set before torch was imported,", process["threads"], threads)


@check("C40", level=4, builds_on=["C36"])
def test_three_wrappers_see_every_call_in_the_configs_order(wrapped: Any, subject: Subject, world_size: int) -> None:
    order = [[name, "in"] for name in NAMES] + [[name, "out"] for name in reversed(NAMES)]
    pids = [process["pid"] for process in wrapped.processes]
    require_equal("the list of processes with calls", sorted({call[0] for call in wrapped.calls}), sorted(pids))
    for pid in pids:
        own = [call[1:] for call in wrapped.calls if call[0] == pid]
        hooks = ["init", *["forward_backward", "optimizer_step"] * 3, "forward", "save"]
        expected = [(name, hook, where) for hook in hooks for name, where in order]
        require_equal("the list of calls that wrappers saw", own, expected)
    undisturbed = subject.trained("qwen3")
    for result, wanted in zip(wrapped.results, undisturbed.results[:3], strict=True):
        metrics = metrics_of(wanted)
        names = (dict.fromkeys(sorted(each)) for each in (result.metrics, metrics))
        require_equal("the set of metrics with wrappers", *names)
        for name, metric in result.metrics.items():
            require_near(f"the metric {name!r} with wrappers, against none,", metric.value, metrics[name], LOSS)
        norms = (result.grad_norm, wanted[0].grad_norm)
        require_near("the gradient norm with wrappers, against none,", *norms, GRAD_NORM)
