"""A backend under Ray: a role's ranks as one group, next to engines, as in a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from corerl.algorithms import ACTOR
from corerl.cluster.arrangement import arrange
from corerl.cluster.group import RayGroup
from corerl.cluster.placement import Slot, reserved
from corerl.cluster.runtime import ray_session
from corerl.config import Config, ModelConfig
from corerl.config.schema import BackendChoice, ExtensionChoice, RoleChoice, RolesConfig
from corerl.engines import EngineContext, GenerateRequest, SamplingParams
from corerl.engines.fleet import EngineFleet
from corerl.engines.service import EngineAssignment
from corerl.errors import EngineFailed
from corerl.plan.models import build_models, load_configs
from corerl.plan.resolve import plugins_of, resolve_tables
from corerl.plan.roles import RolePlan, plan_role
from corerl.plugin import Kind, load
from corerl.plugin.origins import origins_of
from corerl.rollout import EventLoop
from corerl.trainer.group import StoredBatch, TrainGroup
from corerl.types import FloatArray, Output, SampleBatch, TrainResult, offsets_of
from corerl.weights import Address
from corerl_testing import wrappers
from corerl_testing.harness import LOSS, Setup, error_of, samples_at, step_at

ENGINE = "transformers"
# torch reads the first on import; Ray would set it to 1, the number of CPUs that a process requests. All ranks together
# have more such threads than there are cores: the second makes them sleep while they wait, which leaves cores to
# others.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}


@contextlib.contextmanager
def slots() -> Iterator[Mapping[str, Sequence[Slot]]]:
    """Start Ray on this machine, with slots for two ranks and an engine."""
    with ray_session(address="", cpus=3):
        with reserved(arrange({ACTOR: 2, "engines": 1}, own_devices=("engines",))) as all_slots:
            yield all_slots


def plan_of(setup: Setup, ranks: int, run_dir: Path, extensions: Sequence[str] = ()) -> RolePlan:
    name = load(Kind.BACKENDS, setup.backend).name
    config = Config(
        model=ModelConfig(path=setup.model),
        train=setup.train,
        weights=setup.weights,
        backend=BackendChoice(name=setup.backend),
        backends={name: dict(setup.options)},
        roles=RolesConfig(actor=RoleChoice(ranks=ranks)),
        extensions=tuple(ExtensionChoice(name=each) for each in extensions),
    )
    config, plugins = resolve_tables(config), plugins_of(config)
    models = build_models(config, plugins, load_configs(config, [ACTOR]))
    plan = plan_role(ACTOR, config, plugins, device="cpu", run_dir=str(run_dir), model=models[ACTOR])
    assignments = tuple(evolve(each, config=evolve(each.config, seed=setup.seed)) for each in plan.assignments)
    return evolve(plan, assignments=assignments)


@contextlib.contextmanager
def launched(plan: RolePlan, slots: Sequence[Slot]) -> Iterator[TrainGroup]:
    """A group that is started but not initialized."""
    group = TrainGroup.launch(
        evolve(plan, environment={**ENVIRONMENT, **plan.environment}), slots[: len(plan.assignments)]
    )
    try:
        yield group
    finally:
        group.processes.kill()


def train(group: TrainGroup, setup: Setup, number: int, samples: SampleBatch | None = None) -> TrainResult:
    batch = samples or samples_at(number)
    (plan,) = group.plan_steps(batch, seed=0)
    return group.train(StoredBatch(batch), plan, LOSS, step_at(number)).result()


def logprobs(group: TrainGroup, setup: Setup, batch: SampleBatch) -> FloatArray:
    columns = group.forward(StoredBatch(batch), (Output.LOGPROBS,)).result()
    return columns[Output.LOGPROBS]


# ---- with an engine --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(setup: Setup, slots: Sequence[Slot]) -> Iterator[EngineFleet]:
    """One engine replica with the model's architecture, waiting for weights."""
    loaded = load(Kind.ENGINES, ENGINE)
    assignment = EngineAssignment(
        engine=ENGINE,
        origins=origins_of((Kind.ENGINES, loaded)),
        model=ModelConfig(path=setup.model),
        options={},
        context=EngineContext(name="engine-0", index=0, device="cpu", precision="float32"),
    )
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    processes = RayGroup(
        ["engine-0"], "corerl.engines.service:EngineService", slots, environment, failure=EngineFailed, threads=2
    )
    loop = EventLoop("rollout")
    try:
        fleet = EngineFleet(processes, [assignment], loop)
        fleet.start().result()
        yield fleet
    finally:
        processes.kill()
        loop.close()


def push(group: TrainGroup, fleet: EngineFleet, version: int, *, transport: str, directory: Path) -> dict[str, str]:
    """Update the engine; returns each engine's error, "" if the weights arrived whole by their checksums."""
    ranks = (0,) * len(fleet.names)
    address = Address(
        transport=transport, engines=fleet.names, path=str(directory), colocated_ranks=ranks, timeout=60.0
    )
    address = group.rendezvous(address)
    receiving = fleet.receive(group.manifest().result(), version, address)
    sent = group.update_weights(address, version).result()
    received = fleet.received(receiving, 60.0)
    fleet.updated([name for name, each in received.items() if not each.error])
    return {
        name: sent.engines.get(name) or (received[name].error if name in received else "no answer within 60 s")
        for name in fleet.names
    }


def sampled(fleet: EngineFleet, number: int) -> SampleBatch:
    """The engine's answers to a few prompts, as the loop passes them to training."""
    rng = np.random.default_rng(number)
    prompts = [rng.integers(3, 97, length) for length in (3, 5, 2, 4)]
    request = GenerateRequest(
        tokens=np.concatenate(prompts),
        offsets=offsets_of([len(prompt) for prompt in prompts]),
        noise_keys=np.arange(len(prompts)) + 100 * number,
        params=SamplingParams(max_tokens=8, stop_tokens=(2,)),
    )
    answers = fleet.loop.run(fleet.generate(request))
    tokens, mask, logprobs, versions, lengths = [], [], [], [], []
    for row, prompt in enumerate(prompts):
        start, end = answers.offsets[row : row + 2]
        tokens += [prompt, answers.tokens[start:end]]
        mask += [np.zeros(len(prompt), np.bool_), np.ones(end - start, np.bool_)]
        logprobs += [np.zeros(len(prompt), np.float32), answers.logprobs[start:end]]
        versions += [np.zeros(len(prompt), np.int64), answers.versions[start:end]]
        lengths.append(len(prompt) + int(end - start))
    column = np.concatenate(logprobs).astype(np.float32)
    loss_mask = np.concatenate(mask)
    advantages = np.repeat(np.array([1.0, -0.5, 0.75, -1.25], np.float32), lengths)
    return SampleBatch(
        tokens=np.concatenate(tokens).astype(np.int64),
        offsets=offsets_of(lengths),
        columns={
            "loss_mask": loss_mask,
            "rollout_logprobs": column,
            "old_logprobs": column,
            "ref_logprobs": column,
            "advantages": np.where(loss_mask, advantages, 0.0).astype(np.float32),
            "versions": np.concatenate(versions),
        },
        row_columns={"group": np.arange(len(prompts)) // 2},
    )


# ---- with wrappers ---------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Wrapped:
    """What a group with three wrappers reported, before and after one of its ranks was killed."""

    results: list[TrainResult]  # of steps 0 to 2
    logprobs: FloatArray
    calls: list[tuple[int, str, str, str]]  # process, wrapper, hook, in or out
    processes: list[Mapping[str, Any]]  # by rank: pid, threads, env
    died: str  # the error of training afterwards
    then: str  # the error of the next call


def wrapped(setup: Setup, ranks: int, slots: Sequence[Slot], run_dir: Path) -> Wrapped:
    run_dir.mkdir(parents=True)
    names = [f"{wrappers.__name__}:{name}" for name in wrappers.NAMES]
    with launched(plan_of(setup, ranks, run_dir, names), slots) as group:
        group.init().result()
        results = [train(group, setup, number) for number in range(3)]
        column = logprobs(group, setup, samples_at(3))
        group.save(str(run_dir / ACTOR), step_at(3), background=False).result()
        calls = [tuple(json.loads(line)) for line in (run_dir / "calls.jsonl").read_text().splitlines()]
        processes = [json.loads((run_dir / f"process-{rank}.json").read_text()) for rank in range(ranks)]
        os.kill(processes[-1]["pid"], signal.SIGKILL)
        died = error_of(lambda: train(group, setup, 3))
        then = error_of(lambda: group.clear_memory().result())
    return Wrapped(results=results, logprobs=column, calls=calls, processes=processes, died=died, then=then)
