"""On GPUs: sleep frees memory, as the driver reports it, and loses nothing, and numbers match those of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.plugin import Capability
from corerl.types import MemoryKind, Output
from corerl_testing import gpu_scenarios
from corerl_testing.compare import (
    Trajectory,
    assert_near_float32,
    grad_norm_of,
    in_order,
    loss_of,
    require_same_state,
    together,
    transformers_outputs,
    weights_apart,
    whole,
)
from corerl_testing.harness import LONG, Setup, make_samples
from corerl_testing.marks import check
from corerl_testing.models import tiny_fields
from corerl_testing.require import require, require_equal, require_near
from corerl_testing.scenarios import pictures, training
from corerl_testing.subject import PACKINGS, PLAIN, STEPS, WHOLE, Subject
from corerl_testing.suite.test_pictures import Tower, of_plain, picture_setup
from corerl_testing.tolerances import GPU_GRAD_NORM, GPU_LOGPROBS, GPU_LOSS, GPU_WEIGHTS_L2, Tolerance

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
def test_sleep_frees_most_of_the_memory_that_training_took(subject: Subject) -> None:
    setup = setup_of(subject)
    ranks = subject.run(gpu_scenarios.measure_sleep, setup)
    for rank in ranks:
        took, freed = rank.trained - rank.before, rank.trained - rank.asleep
        require(
            freed >= 0.9 * took,
            f"init and training took {took} bytes of the device, and sleep gave back {freed}, expected 90 % or more",
        )
        for kind, (said, read, driver) in rank.freed.items():
            for who, bytes_ in (("the driver", driver), ("storages", read)):
                require(
                    abs(bytes_ - said) < 0.1 * said + SLACK,
                    f"sleep says that it freed {said} bytes of {kind}, but by {who} it was {bytes_}",
                )
        # This process's, or all that the device has in use.
        require(
            0 < rank.residual <= rank.asleep + SLACK,
            f"SleepResult.residual is {rank.residual} bytes, but the device has {rank.asleep} in use",
        )
        require(rank.freed[MemoryKind.PARAM][0] > 0, "sleep freed 0 bytes of parameters, expected more")
        require(
            rank.awake <= rank.trained + SLACK,
            f"after waking the device has {rank.awake} bytes in use, before sleeping it had {rank.trained}",
        )
        require(rank.equal, "weights or moments after waking differ from those before sleeping")
    moments = 2 * 4 * parameters_of(setup)  # bytes: two in float32, however ranks divide them
    freed = sum(rank.freed[MemoryKind.OPTIMIZER][0] for rank in ranks)
    require(freed > 0.9 * moments, f"sleep freed {freed} bytes of moments, expected {moments}, two in float32")


@check("C32", level=3, needs=[Capability.SLEEP], builds_on=["C31"])
def test_ten_rounds_of_sleep_lose_no_bit_and_no_memory(subject: Subject) -> None:
    setup = setup_of(subject)
    ranks = subject.run(gpu_scenarios.cycle, setup, 10, True)
    awake = subject.run(gpu_scenarios.cycle, setup, 10, False)
    for rank in ranks:
        require_equal("the list of whether a round of sleep restored all", rank.equal, [True] * 10)
        most, second = max(rank.used[2:]), rank.used[1]
        require(most <= second + SLACK, f"rounds 3 to 10 use up to {most} bytes, the second {second}: memory leaks")
    for number in range(10):
        found, wanted = ([rank.results[number] for rank in each] for each in (ranks, awake))
        losses, norms = ((of(found), of(wanted)) for of in (loss_of, grad_norm_of))
        require_near(f"the loss of round {number} with sleep, against none,", *losses, Tolerance(RELATIVE, 1e-6))
        require_near(f"the gradient norm of round {number} with sleep, against none,", *norms, Tolerance(RELATIVE))


@check("C33", level=3, needs=[Capability.SLEEP], builds_on=["C31"])
def test_to_sleep_or_to_wake_twice_does_nothing(subject: Subject) -> None:
    for rank in subject.run(gpu_scenarios.measure_sleep, setup_of(subject)):
        require_equal("the list of bytes freed and restored the second time", rank.twice, (0, 0))


@check("C34", level=3, needs=[Capability.SLEEP], builds_on=["C21", "C31"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_update_right_after_waking_delivers_what_was_trained(subject: Subject, kind: str) -> None:
    ranks = subject.run(gpu_scenarios.push_after_waking, setup_of(subject, kind))
    trained = whole([state for _, state in ranks])["master"]
    what = "weights as an engine gets them right after waking, and as trained,"
    require_same_state(what, {"master": ranks[0][0]}, {"master": trained}, ["master"])


@check("C62", level=3, builds_on=["C51"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_forward_on_gpus_gives_what_transformers_gives_on_a_cpu(subject: Subject, kind: str) -> None:
    for samples, packing in ((make_samples(7, samples=13), PACKINGS["packed"]), (make_samples(7, lengths=LONG), WHOLE)):
        results = subject.run(training.forward_only, subject.setup(kind, packing), samples)
        wanted = transformers_outputs(subject.model(kind), samples)
        for output in (Output.LOGPROBS, Output.ENTROPY):
            found, lengths = in_order(results, samples, output), sorted(set(samples.lengths.tolist()))
            what = (
                f"{output} of samples of {lengths[0]} to {lengths[-1]} tokens on a GPU, against transformers on a CPU,"
            )
            require_near(what, found, wanted[output], Tolerance(0.0, GPU_LOGPROBS))


@check("C62", level=3, builds_on=["C41"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_training_on_gpus_follows_the_plain_backend_on_a_cpu(subject: Subject, kind: str) -> None:
    assert_follows_on_gpus(subject.trained(kind), subject.runs.trained(PLAIN, 1, kind, WHOLE))


def assert_follows_on_gpus(found: Trajectory, wanted: Trajectory) -> None:
    require_near("the losses by step on a GPU, against plain's on a CPU,", found.losses, wanted.losses, GPU_LOSS)
    norms = (found.grad_norms, wanted.grad_norms)
    require_near("the gradient norms by step on a GPU, against plain's on a CPU,", *norms, GPU_GRAD_NORM)
    apart = weights_apart(found.state["master"], wanted.state["master"])
    require(apart < GPU_WEIGHTS_L2, f"the weights are {apart:.2g} from plain's, at most {GPU_WEIGHTS_L2:g} is allowed")


@check("C62", level=3, needs=[Capability.PICTURES], builds_on=["C77"])
@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_training_on_pictures_on_gpus_follows_the_plain_backend_on_a_cpu(subject: Subject, tower: Tower) -> None:
    setup = picture_setup(subject, tower)
    found = together(subject.run(pictures.train_on_pictures, setup, range(STEPS)))
    assert_follows_on_gpus(found, of_plain(subject, tower, range(STEPS)))


@check("C62", level=3, needs=[Capability.BFLOAT16], builds_on=["C55"])
def test_bfloat16_on_gpus_stays_near_plain_on_a_cpu(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    found = subject.train(evolve(setup, train=evolve(setup.train, precision="bfloat16")), range(STEPS))
    wanted = subject.runs.trained(PLAIN, 1, "qwen3", WHOLE)
    assert_near_float32(found, wanted, at_least=GPU_WEIGHTS_L2)


@check("C35", level=3, builds_on=["C12"])
def test_nothing_is_put_on_devices_of_other_ranks(subject: Subject) -> None:
    own = list(range(subject.world_size))
    befores, durings = zip(*subject.run(gpu_scenarios.memory_of_other_devices, setup_of(subject), own), strict=True)
    if not befores[0]:
        pytest.skip("there is no other GPU to check")
    for before, during in zip(befores, durings, strict=True):
        taken = np.array([during[index] - before[index] for index in before])
        require((taken < 2**20).all(), f"{taken.tolist()} bytes were taken on other ranks' devices, expected 0")
