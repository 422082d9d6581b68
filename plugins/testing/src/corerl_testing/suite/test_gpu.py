"""On GPUs: sleep frees memory, as the driver reports it, and loses nothing, and numbers match those of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.plugin.capabilities import Capability
from corerl.types import MemoryKind, Output
from corerl_testing import gpu_scenarios
from corerl_testing.compare import (
    different,
    grad_norm_of,
    in_order,
    loss_of,
    mean_apart,
    transformers_outputs,
    weights_apart,
    whole,
)
from corerl_testing.harness import Setup, make_samples
from corerl_testing.marks import check
from corerl_testing.models import tiny_fields
from corerl_testing.scenarios import training
from corerl_testing.subject import PLAIN, STEPS, WHOLE, Subject
from corerl_testing.tolerances import (
    BFLOAT16_GRAD_NORM,
    BFLOAT16_LOSS,
    GPU_GRAD_NORM,
    GPU_LOGPROBS,
    GPU_LOSS,
    GPU_WEIGHTS_L2,
)

RELATIVE = 1e-4  # some sums on a GPU have no fixed order
SLACK = 64 * 2**20  # bytes: libraries' workspaces, allocated when first needed


def setup_of(subject: Subject, kind: str = "qwen3") -> Setup:
    fields = {**tiny_fields(kind), **gpu_scenarios.FIELDS}
    setup = subject.of(Setup(backend=subject.backend, model="", fields=fields))
    return evolve(setup, weights=evolve(setup.weights, bucket_bytes=2**24))


def parameters_of(setup: Setup) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**setup.fields))
    return sum(param.numel() for param in model.parameters())


@check("C31", level=3, needs=[Capability.SLEEP], builds_on=["C43"])
def test_sleep_gives_back_most_of_what_init_and_training_took_and_each_kind_its_own(subject: Subject) -> None:
    setup = setup_of(subject)
    ranks = subject.run(gpu_scenarios.measure_sleep, setup)
    for rank in ranks:
        assert rank.trained - rank.asleep >= 0.9 * (rank.trained - rank.before)
        for said, read, driver in rank.freed.values():
            assert abs(driver - said) < 0.1 * said + SLACK
            assert abs(read - said) < 0.1 * said + SLACK
        assert 0 < rank.residual <= rank.asleep + SLACK  # this process's, or all that the device has in use
        assert rank.freed[MemoryKind.PARAM][0] > 0
        assert rank.awake <= rank.trained + SLACK
        assert rank.equal
    moments = 2 * 4 * parameters_of(setup)  # bytes: two in float32, however ranks divide them
    assert sum(rank.freed[MemoryKind.OPTIMIZER][0] for rank in ranks) > 0.9 * moments


@check("C32", level=3, needs=[Capability.SLEEP], builds_on=["C31"])
def test_ten_rounds_of_training_and_sleep_lose_no_bit_and_no_memory(subject: Subject) -> None:
    setup = setup_of(subject)
    ranks = subject.run(gpu_scenarios.cycle, setup, 10, True)
    awake = subject.run(gpu_scenarios.cycle, setup, 10, False)
    for rank in ranks:
        assert rank.equal == [True] * 10
        assert max(rank.used[2:]) <= rank.used[1] + SLACK
    for number in range(10):
        found, wanted = ([rank.results[number] for rank in each] for each in (ranks, awake))
        assert loss_of(found) == pytest.approx(loss_of(wanted), rel=RELATIVE, abs=1e-6)
        assert grad_norm_of(found) == pytest.approx(grad_norm_of(wanted), rel=RELATIVE)


@check("C33", level=3, needs=[Capability.SLEEP], builds_on=["C31"])
def test_to_sleep_or_to_wake_twice_does_nothing(subject: Subject) -> None:
    assert [rank.twice for rank in subject.run(gpu_scenarios.measure_sleep, setup_of(subject))] == [
        (0, 0)
    ] * subject.world_size


@check("C34", level=3, needs=[Capability.SLEEP], builds_on=["C21", "C31"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_update_right_after_waking_delivers_what_was_trained(subject: Subject, kind: str) -> None:
    ranks = subject.run(gpu_scenarios.push_after_waking, setup_of(subject, kind))
    trained = whole([state for _, state in ranks])["master"]
    assert different({"master": ranks[0][0]}, {"master": trained}, ["master"]) == []


@check("C62", level=3, builds_on=["C51"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_forward_on_gpus_gives_what_transformers_gives_on_a_cpu(subject: Subject, kind: str) -> None:
    samples = make_samples(7, samples=13)
    results = subject.run(training.forward_only, subject.setup(kind), samples)
    wanted = transformers_outputs(subject.model(kind), samples)
    for output in (Output.LOGPROBS, Output.ENTROPY):
        np.testing.assert_allclose(in_order(results, samples, output), wanted[output], rtol=0, atol=GPU_LOGPROBS)


@check("C62", level=3, builds_on=["C41"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_training_on_gpus_follows_the_plain_backend_on_a_cpu(subject: Subject, kind: str) -> None:
    found = subject.trained(kind)
    wanted = subject.runs.trained(PLAIN, 1, kind, WHOLE)
    assert found.losses == pytest.approx(wanted.losses, rel=GPU_LOSS.relative, abs=GPU_LOSS.absolute)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=GPU_GRAD_NORM.relative)
    assert weights_apart(found.state["master"], wanted.state["master"]) < GPU_WEIGHTS_L2


@check("C62", level=3, needs=[Capability.BFLOAT16], builds_on=["C55"])
def test_bfloat16_on_gpus_stays_near_the_plain_backend_on_a_cpu(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    found = subject.train(evolve(setup, train=evolve(setup.train, precision="bfloat16")), range(STEPS))
    wanted = subject.runs.trained(PLAIN, 1, "qwen3", WHOLE)
    assert mean_apart(found.losses, wanted.losses) < BFLOAT16_LOSS
    assert mean_apart(found.grad_norms, wanted.grad_norms) < BFLOAT16_GRAD_NORM
    assert weights_apart(found.state["master"], wanted.state["master"]) > GPU_WEIGHTS_L2  # the precision matters


@check("C35", level=3, builds_on=["C12"])
def test_nothing_is_put_on_devices_of_other_ranks(subject: Subject) -> None:
    own = list(range(subject.world_size))
    befores, durings = zip(*subject.run(gpu_scenarios.memory_of_other_devices, setup_of(subject), own), strict=True)
    if not befores[0]:
        pytest.skip("there is no other GPU to check")
    for before, during in zip(befores, durings, strict=True):
        taken = np.array([during[index] - before[index] for index in before])
        assert (taken < 2**20).all(), f"bytes taken on other devices: {taken.tolist()}"
