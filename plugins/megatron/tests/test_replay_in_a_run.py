"""Routing replay as a run asks for it: recorded by the trainer, or told by the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corerl_testing import read_rollout, saved_rollouts
from tests.end_to_end.command import Command, numbers

pytestmark = pytest.mark.processes

RUN = """
backend.name = "megatron"
run.steps = 1
cluster.device = "cpu"
roles.actor.ranks = 2
extensions = [{ name = "jsonl" }]
backends.megatron.pipeline_parallel = 2
algorithm.old_logprobs = "recompute"
eval.every = 0
checkpoint.export = false

[model]
tokenizer = "characters:0123456789>s"
[model.config]
model_type = "qwen3_moe"
vocab_size = 16
hidden_size = 32
intermediate_size = 64
moe_intermediate_size = 32
num_experts = 4
num_experts_per_tok = 2
norm_topk_prob = true
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 64
initializer_range = 0.08
bos_token_id = 1
eos_token_id = 2
pad_token_id = 0

[data]
held_out = 16

[rollout]
prompts = 8
samples = 4
max_tokens = 7
save = true

[train]
mini_batches = 2
[train.optimizer]
lr = 1e-2
"""


def trained(directory: Path, replay: str, *, backend: str = "megatron") -> list[Mapping[str, Any]]:
    """The run's metrics, without what a clock measured."""
    file = directory / "run.toml"
    file.write_text(RUN)
    run = directory / f"{backend}-{replay}"
    settings = (f"run.dir={run}", f"algorithm.routing_replay={replay}", f"backend.name={backend}")
    with Command("train", file, *settings, logs=directory) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    return numbers(run)


def of_losses(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Without the load of experts: what an engine samples last it has no experts of, so that each step's own choose."""
    return {name: value for name, value in metrics.items() if not name.startswith("moe/")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def engine(directory: Path) -> list[Mapping[str, Any]]:
    return trained(directory, "engine")


@pytest.mark.nightly
def test_trainer_and_engine_of_the_same_weights_tell_the_same_experts_which_differ_from_those_of_later_weights(
    directory: Path, engine: list[Mapping[str, Any]]
) -> None:
    none, recompute = (trained(directory, replay) for replay in ("none", "recompute"))
    assert len(recompute) == len(engine) == 1
    for one, other in zip(recompute, engine, strict=True):
        assert of_losses(one) == {
            name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in of_losses(other).items()
        }
        assert other["rollout/logprob_diff"] < 1e-5
    # The second mini-batch is of weights that one step has changed.
    assert abs(none[0]["train/grad_norm"] / engine[0]["train/grad_norm"] - 1) > 5e-3

    batch = read_rollout(saved_rollouts(directory / "megatron-engine")[0]).rollout.batch
    experts = batch.columns["routed_experts"]
    assert experts.shape == (len(batch.tokens), 2, 2)
    last = np.zeros(len(batch.tokens), dtype=np.bool_)
    last[batch.offsets[1:] - 1] = True
    assert ((experts == -1).all(axis=(1, 2)) == last).all()
    assert "routed_experts" not in read_rollout(saved_rollouts(directory / "megatron-none")[0]).rollout.batch.columns


@pytest.mark.nightly
@pytest.mark.parametrize("replay", ["recompute", "engine"])
def test_fsdp_whose_model_is_transformers_goes_the_same_way(
    directory: Path, engine: list[Mapping[str, Any]], replay: str
) -> None:
    (found,), (wanted,) = trained(directory, replay, backend="fsdp"), engine
    alike = [name for name in wanted if name.startswith(("train/", "rollout/"))]
    assert len(alike) > 10
    for name in alike:
        assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name
