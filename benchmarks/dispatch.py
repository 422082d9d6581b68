"""Measure the cost of reaching a backend: `TrainGroup.train` around an empty `train`, against bare Ray actor calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from attrs import evolve

from benchmarks.empty_backend import empty_result
from benchmarks.report import ENVIRONMENT, Comparison, Number, Report, finish, in_turns, parser
from benchmarks.samples import make_batch, plan_one_step
from corerl.cluster.arrangement import arrange
from corerl.cluster.placement import reserved
from corerl.cluster.runtime import put, ray_session
from corerl.config.schema import BackendChoice, Config, RoleChoice, RolesConfig
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.resolve import plugins_of, resolve_tables
from corerl.plan.roles import plan_role
from corerl.trainer.group import TrainGroup, share
from corerl.types import Step, TrainResult

RANKS = 2


class Bare:
    """What one would write without CoreRL."""

    def train(self, samples: Any, plan: Any, loss: Any, step: Any) -> TrainResult:
        return empty_result()

    def nothing(self) -> None:
        """Neither arguments nor a result."""


def per_call(call: Callable[[], object], calls: int) -> float:
    """Seconds of the median call."""
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure(*, rounds: int, size: int, calls: int) -> Report:
    config = resolve_tables(
        Config(
            backend=BackendChoice(name="benchmarks.empty_backend:SPEC"),
            backends={"benchmarks.empty_backend:SPEC": {}},
            roles=RolesConfig(actor=RoleChoice(ranks=RANKS)),
            extensions=(),
        )
    )
    loss = plan_algorithm(config, plugins_of(config)).objectives["actor"].loss
    plan = plan_role("actor", config, plugins_of(config), device="cpu")
    samples = make_batch(np.full(size, 13), prompt=7, vocab=16)  # the quickstart's
    step_plan = plan_one_step(samples, dp_size=RANKS, tokens_per_micro_batch=16384)
    step = Step(optimizer_step=0, rollout_step=0, lr=1e-3)
    placement = arrange({"actor": RANKS, "bare": RANKS})
    with ray_session(address="", cpus=placement.cpus), reserved(placement, timeout=60.0) as slots:
        group = TrainGroup.launch(evolve(plan, environment=ENVIRONMENT), slots["actor"])
        group.init().result()
        environment = {"env_vars": ENVIRONMENT}
        actors: list[Any] = [
            ray.remote(Bare).options(runtime_env=environment, **slot.options()).remote() for slot in slots["bare"]
        ]
        shared, whole = share(samples), put(samples)
        shares = [step_plan.share(rank) for rank in range(RANKS)]

        def ours() -> object:
            return group.train(shared, step_plan, loss, step).result()

        def bare() -> object:
            pairs = zip(actors, shares, strict=True)
            return ray.get([actor.train.remote(whole, each, loss, step) for actor, each in pairs])

        def nothing() -> object:
            return ray.get([actor.nothing.remote() for actor in actors])

        for call in (ours, bare, nothing):
            per_call(call, 20)  # Ray leases, imports and caches
        seconds, others = in_turns(rounds, lambda _: per_call(ours, calls), lambda _: per_call(bare, calls))
        empty = [per_call(nothing, calls) for _ in range(rounds)]
        group.shutdown()
    what = "one `TrainGroup.train`"
    return Report(
        name="dispatch",
        size=f"{size} samples, {RANKS} ranks, {calls} calls a round",
        comparisons=[
            Comparison(what=what, against="bare actor calls, same arguments", ours=seconds, other=others, target=1.5),
            Comparison(what=what, against="bare actor calls without arguments", ours=seconds, other=empty),
        ],
        numbers=[Number(what=what, values=seconds, unit="s", target=5e-3)],
        note=(
            "One call from the driver and back. Both sides pass a reference to the batch, the plan of one step, the "
            "loss and the step, and get a TrainResult of eight metrics from each of two processes. CoreRL's call goes "
            "through RayGroup, Worker and PluginHost, and its results are merged over the ranks."
        ),
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=7, size=512, unit="samples of the batch")
    command.add_argument("--calls", type=int, default=200, help="in one round (default: 200)")
    args = command.parse_args()
    finish(measure(rounds=args.rounds, size=args.size, calls=args.calls), args.output)
