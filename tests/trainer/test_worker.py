"""What a rank does, in this process, with the plain backend: every verb, and what is refused before one is made."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from corerl.config.schema import (
    AlgorithmConfig,
    BackendChoice,
    CheckpointConfig,
    Config,
    ExtensionChoice,
    ModelConfig,
    OptimizerConfig,
    RolesConfig,
    SideRoleChoice,
    TrainConfig,
    WeightsConfig,
)
from corerl.data.packing import StepShard, plan_forward, plan_steps
from corerl.errors import (
    ConfigError,
    HookFailed,
    PluginBroken,
    PluginIncompatible,
    PluginNotFound,
    Unsupported,
    WeightUpdateError,
)
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.resolve import plugins_of, resolve_tables
from corerl.plan.roles import Assignment, plan_role
from corerl.plugin.transports import open_receiver
from corerl.trainer.worker import Compilations, Worker
from corerl.types import (
    FloatArray,
    GradientResult,
    LossSpec,
    Metric,
    Output,
    ParallelLayout,
    Reduction,
    SampleBatch,
    Step,
    StepResult,
    TrainResult,
)
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address
from corerl_testing.harness import make_samples
from corerl_testing.models import write_tiny_model
from tests.trainer.configs import config_for

LR, CLIP_NORM = 1e-3, 0.5
STEP = Step(optimizer_step=0, rollout_step=0, lr=LR)
LOSS = LossSpec(name="clipped", params={"clip_low": 0.2, "clip_high": 0.28})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory that transformers wrote."""
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def config(model: Path) -> Config:
    return config_for(
        "plain",
        ranks=1,
        model=ModelConfig(path=str(model)),
        algorithm=AlgorithmConfig(entropy_coef=0.0),
        train=TrainConfig(
            tokens_per_micro_batch=48, optimizer=OptimizerConfig(lr=LR, weight_decay=0.1, clip_norm=CLIP_NORM)
        ),
        weights=WeightsConfig(bucket_bytes=2**15),
        checkpoint=CheckpointConfig(background=True),
    )


@pytest.fixture
def assignment(config: Config) -> Assignment:
    return assigned(config)


def assigned(config: Config, resume: str = "") -> Assignment:
    (assignment,) = plan_role("actor", config, plugins_of(config), device="cpu", resume=resume).assignments
    return assignment


@pytest.fixture
def worker(assignment: Assignment) -> Iterator[Worker]:
    worker = Worker(assignment)
    worker.init("127.0.0.1", 0)
    yield worker
    worker.shutdown("finished")


def training_shard(batch: SampleBatch) -> StepShard:
    (plan,) = plan_steps(
        batch,
        ParallelLayout.data_parallel(rank=0, world_size=1),
        tokens_per_micro_batch=48,
        aggregation="token-mean",
        max_tokens=32,
        seed=0,
    )
    return plan.shard_of(0)


def logprobs(worker: Worker, batch: SampleBatch, snapshot: str = "") -> FloatArray:
    """[N] in the batch's order."""
    plan = plan_forward(batch, ParallelLayout.data_parallel(rank=0, world_size=1), tokens_per_micro_batch=48)
    result = worker.forward(batch, plan.shard_of(0), (Output.LOGPROBS,), snapshot)
    column = np.zeros(len(batch.tokens), dtype=np.float32)
    for sample, values in zip(
        result.rows, np.split(result.outputs[Output.LOGPROBS], result.offsets[1:-1]), strict=True
    ):
        column[batch.offsets[sample] : batch.offsets[sample + 1]] = values
    return column


def train(worker: Worker, batch: SampleBatch, number: int = 0) -> TrainResult:
    return worker.train(batch, training_shard(batch), LOSS, evolve(STEP, optimizer_step=number))


# ---- experts that are told -------------------------------------------------------------------------------------------


def test_a_backend_without_replay_refuses_experts(config: Config) -> None:
    name = "tests.trainer.fakes:NO_REPLAY"
    backends = {name: config.backends["plain"]}
    worker = Worker(assigned(evolve(config, backend=BackendChoice(name=name), backends=backends)))
    worker.init("127.0.0.1", 0)
    batch = make_samples(1)
    told = batch.with_columns(routed_experts=np.zeros((len(batch.tokens), 1, 1), np.int16))
    plan = plan_forward(batch, ParallelLayout.data_parallel(rank=0, world_size=1), tokens_per_micro_batch=48)
    for verb in (
        lambda: worker.forward(batch, plan.shard_of(0), (Output.ROUTED_EXPERTS,)),
        lambda: worker.forward(told, plan.shard_of(0), (Output.LOGPROBS,), replay=True),
        lambda: train(worker, told),
        lambda: worker.forward_backward(told, training_shard(told), LOSS, (), False),
    ):
        with pytest.raises(Unsupported, match="with 'routed_experts' requires 'routing-replay', which the backend"):
            verb()
    # What is not to be replayed is not looked at.
    assert np.array_equal(logprobs(worker, told), logprobs(worker, batch))
    worker.shutdown("finished")


def test_a_critic_is_not_given_the_actors_experts(config: Config) -> None:
    critic = evolve(config, algorithm=AlgorithmConfig(name="ppo"), roles=RolesConfig(critic=SideRoleChoice()))
    critic = resolve_tables(critic)
    loss = plan_algorithm(critic, plugins_of(critic)).objectives["critic"].loss
    (assignment,) = plan_role("critic", critic, plugins_of(critic), device="cpu").assignments
    batch = make_samples(1)
    told = batch.with_columns(routed_experts=np.zeros((len(batch.tokens), 1, 1), np.int16))
    results = []
    for samples in (batch, told):
        worker = Worker(assignment)
        worker.init("127.0.0.1", 0)
        results.append(worker.train(samples, training_shard(samples), loss, STEP))
        worker.shutdown("finished")
    assert results[0] == results[1]


# ---- what a traced run shows -----------------------------------------------------------------------------------------


class SampleShown:
    """What was begun and ended, in order: '> train', '< train'."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.log.append(f"> {name}")
        try:
            yield
        finally:
            self.log.append(f"< {name}")


def test_a_traced_rank_has_a_span_per_micro_batch(
    worker: Worker, assignment: Assignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, shown = make_samples(1), SampleShown()
    traced = Worker(assignment)
    traced.trace(shown)
    traced.init("127.0.0.1", 0)
    backend: Any = traced.backend
    monkeypatch.setattr(backend, "outputs", logged(backend.outputs, "forward", shown))
    monkeypatch.setattr(backend.optimizer, "step", logged(backend.optimizer.step, "step", shown))
    count = len(training_shard(batch).filler)
    assert count > 1
    assert train(traced, batch) == train(worker, batch)
    one = ["> micro-batch", "forward", "< micro-batch"]
    assert shown.log == [*one * count, "> optimizer", "step", "< optimizer"]
    shown.log.clear()
    assert np.array_equal(logprobs(traced, batch), logprobs(worker, batch))
    assert shown.log == [*one * count, "> results", "< results"]
    shown.log.clear()
    traced.forward_backward(batch, training_shard(batch), LOSS, (), True)
    assert shown.log == [*one * count, "> results", "< results"]


def logged(function: Callable[..., Any], name: str, shown: SampleShown) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        shown.log.append(name)
        return function(*args, **kwargs)

    return call


def test_a_traced_weight_update_shows_whom_it_waits_for(worker: Worker, tmp_path: Path) -> None:
    shown = SampleShown()
    worker.trace(shown)
    address = Address(transport="disk", engines=("engine-0",), path=str(tmp_path), timeout=60.0)
    with ThreadPoolExecutor(1) as engine:
        receiving = engine.submit(receive, address, worker.manifest(), 1)
        worker.update_weights(address, 1)
        receiving.result()
    buckets = len(worker.manifest().buckets)
    assert buckets > 1
    parts = ["meet engines", *["wait for room", "gather", "send"] * buckets, "wait for engines"]
    assert shown.log == [f"{way} {part}" for part in parts for way in "><"]


def test_extensions_wrap_the_backend_and_write_to_the_runs_directory(config: Config, tmp_path: Path) -> None:
    config = evolve(config, extensions=(ExtensionChoice(name="corerl_testing.wrappers:FIRST"),))
    planned = plan_role("actor", config, plugins_of(config), device="cpu", run_dir=str(tmp_path), resume="")
    worker = Worker(planned.assignments[0])
    worker.init("127.0.0.1", 0)
    worker.shutdown("finished")
    calls = [json.loads(line)[1:] for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert calls[:2] == [["FIRST", "init", "in"], ["FIRST", "init", "out"]]


# ---- verbs -----------------------------------------------------------------------------------------------------------


class Untouched:
    """A column of a rollout batch that nobody may read."""

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return self.entries

    def __getitem__(self, index: object) -> object:
        raise AssertionError("nobody asked for this column")


def test_a_pass_without_loss_reads_no_loss_columns(worker: Worker) -> None:
    batch = make_samples(0)
    columns = {"loss_mask": batch.columns["loss_mask"], "experts": Untouched(len(batch.tokens))}
    assert np.array_equal(logprobs(worker, evolve(batch, columns=columns)), logprobs(worker, batch))
    with pytest.raises(HookFailed, match="nobody asked for this column"):
        train(worker, evolve(batch, columns={**batch.columns, **columns}))


def test_metrics_of_several_calls_are_merged_and_scaled(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def added(loss: float, entropy: Metric, highest: float, tokens: int) -> GradientResult:
        metrics = {
            "loss": Metric(loss, 4.0, Reduction.LOSS),
            "entropy": entropy,
            "highest": Metric(highest, reduction=Reduction.MAX),
            "dropped": Metric(1.0, 1.0, Reduction.SUM),
        }
        return GradientResult(metrics=metrics, tokens=tokens)

    prepared = [added(6.0, Metric(3.0, 2.0), 5.0, 10), added(2.0, Metric(1.0, 6.0), 7.0, 20)]
    prepared.append(evolve(prepared[0], metrics={"late": Metric(2.0, 2.0)}))
    calls: list[tuple[Any, ...]] = []

    def forward_backward(batch: Any, loss: LossSpec, outputs: Any, last: bool, *, at: Step | None) -> GradientResult:
        calls.append((outputs, last, at))
        return prepared[len(calls) - 1]

    def optimizer_step(step: Step, scale: float) -> StepResult:
        return StepResult(applied=False, grad_norm=2.0, metrics={"loss_scale": Metric(scale)})

    monkeypatch.setattr(worker.host, "forward_backward", forward_backward)
    monkeypatch.setattr(worker.host, "optimizer_step", optimizer_step)
    batch = make_samples(1)
    share = training_shard(batch)
    assert worker.forward_backward(batch, share, LOSS, (Output.ENTROPY,), False) == prepared[0]
    assert worker.forward_backward(batch, share, LOSS, (), True) == prepared[1]
    assert worker.optimizer_step(STEP, 0.25) == TrainResult(
        applied=False,
        metrics={
            "loss": Metric((6.0 + 2.0) * 0.25, 8.0, Reduction.LOSS),
            "entropy": Metric(4.0, 8.0),
            "highest": Metric(7.0, reduction=Reduction.MAX),
            "dropped": Metric(2.0, 2.0, Reduction.SUM),
            "loss_scale": Metric(0.25),
        },
        grad_norm=2.0,
        tokens=30,
    )
    after = worker.train(batch, share, LOSS, STEP)
    assert after.metrics == {"late": Metric(2.0, 2.0), "loss_scale": Metric(1.0)} and after.tokens == 10
    assert calls == [((Output.ENTROPY,), False, None), ((), True, None), ((), True, STEP)]


def receive(address: Address, manifest: Manifest, version: int) -> dict[str, torch.Tensor]:
    """As an engine does."""
    receiver = open_receiver(address, index=0)
    tensors = {
        name: tensor.clone()
        for bucket, flat in receiver.buckets(manifest, version)
        for name, tensor in bucket.views(flat).items()
    }
    receiver.close()
    return tensors


def test_engines_get_the_manifests_weights_through_one_sender(worker: Worker, model: Path, tmp_path: Path) -> None:
    address = Address(transport="disk", engines=("engine-0",), path=str(tmp_path / "a"), timeout=60.0)
    weights = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    with ThreadPoolExecutor(1) as engine:
        receiving = engine.submit(receive, address, worker.manifest(), 1)
        result = worker.update_weights(address, 1)
        received = receiving.result()
        assert result.engines == {}
        assert result.bytes == sum(tensor.nbytes for tensor in weights.values())
        assert received.keys() == weights.keys()
        assert all(torch.equal(received[name], weights[name]) for name in weights)

        sender = worker.sender
        train(worker, make_samples(2))
        receiving = engine.submit(receive, address, worker.manifest(), 2)
        worker.update_weights(address, 2)
        assert worker.sender is sender
        assert not torch.equal(receiving.result()["lm_head.weight"], weights["lm_head.weight"])

        elsewhere = evolve(address, path=str(tmp_path / "b"))
        receiving = engine.submit(receive, elsewhere, worker.manifest(), 3)
        worker.update_weights(elsewhere, 3)
        assert worker.sender is not sender
        assert not list((tmp_path / "a").glob("v*"))  # the one before has closed
        assert receiving.result().keys() == weights.keys()
    with pytest.raises(WeightUpdateError, match=r"^weights version 3 was refused on actor rank 0, expected 4 or more"):
        worker.update_weights(elsewhere, 3)


# ---- refused before a backend is made --------------------------------------------------------------------------------


ON_EVERY_NODE = "so install it on every node$"


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"backend": "elsewhere"}, PluginNotFound, f"^unknown backend 'elsewhere'; installed: .*, {ON_EVERY_NODE}"),
        (
            {"extensions": (ExtensionChoice(name="elsewhere"),)},
            PluginNotFound,
            f"the driver could load this extension, {ON_EVERY_NODE}",
        ),
        ({"backend": "not_there.backend:SPEC"}, PluginBroken, f"No module named 'not_there'.*, {ON_EVERY_NODE}"),
    ],
)
def test_a_missing_plugin_must_be_installed_on_every_node(
    assignment: Assignment, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Worker(evolve(assignment, **change))


def test_what_differs_from_the_driver_makes_no_backend(assignment: Assignment) -> None:
    core, backend, *rest = assignment.origins
    with pytest.raises(PluginIncompatible, match=r"^backend 'plain' .*, but the driver's is corerl-testing 0\.0\.9; "):
        Worker(evolve(assignment, origins=(core, evolve(backend, version="0.0.9"), *rest)))
    with pytest.raises(ConfigError, match=r"^backends\.plain\.no_such: unknown key"):
        Worker(evolve(assignment, config=evolve(assignment.config, options={"no_such": 1})))


# ---- what torch.compile has made ------------------------------------------------------------------------------------


def test_where_nothing_was_ever_compiled_nothing_is_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert Compilations().take() == 0
    assert "torch._dynamo.utils" not in sys.modules
