"""Adapters in place of all weights: trained as the plain backend trains them, alone, and sent merged."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from attrs import evolve

from corerl.checkpoint import CheckpointSource, begin
from corerl.config import LoraConfig
from corerl.plugin import Capability, Kind, load
from corerl.types import Array
from corerl.weights import adapters_of, is_adapter
from corerl_testing.compare import (
    SAVED,
    Tensors,
    assert_follows,
    assert_losses,
    assert_same_metrics,
    assert_same_weights,
    require_same_state,
    weights_apart,
    whole,
)
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import sleeping, updates
from corerl_testing.subject import PLAIN, WHOLE, Checkpoint, Subject
from corerl_testing.suite.test_memory import held_as_predicted

# No value is a default, nothing divides the rank, and the scale is no power of two.
LORA = LoraConfig(rank=3, alpha=7.0).settled({})
SOME = evolve(LORA, rslora=True, init="gaussian", targets=("q_proj", "v_proj", "down_proj"))
EXPERTS = evolve(LORA, targets=("all-linear", "experts"))
STEPS = 3
MERGED = 1e-6  # relative L2: a sum in float32, of a product that may be summed in another order


def adapted(setup: Setup, lora: LoraConfig = LORA) -> Setup:
    return evolve(setup, lora=lora)


@check("C72", level=1, needs=[Capability.LORA], builds_on=["C41", "C61"], variants={"kind": "qwen3-tied", "lora": LORA})
@pytest.mark.parametrize(
    ("kind", "lora"), [("qwen3-tied", LORA), ("qwen2", LORA), ("qwen3-moe", LORA), ("llama", SOME)]
)
def test_adapters_train_as_the_plain_backends_and_all_else_stays(subject: Subject, kind: str, lora: LoraConfig) -> None:
    _train_as_plain(subject, kind, lora)


@check("C72", level=1, needs=[Capability.LORA, Capability.EXPERT_LORA], builds_on=["C41", "C61"])
def test_adapters_of_experts_train_as_the_plain_backends(subject: Subject) -> None:
    _train_as_plain(subject, "qwen3-moe", EXPERTS)


def _train_as_plain(subject: Subject, kind: str, lora: LoraConfig) -> None:
    found = subject.train(adapted(subject.setup(kind), lora), range(STEPS))
    plain = subject.runs.trained_as(1, adapted(subject.runs.setup(PLAIN, kind, WHOLE), lora), STEPS)
    for key in SAVED:
        mine, others = (dict.fromkeys(sorted(each.state[key])) for each in (found, plain))
        what = f"local_state({key!r}), which has the adapters alone by the names of corerl.weights.adapters,"
        require_equal(what, mine, others)
    frozen = [name for name in found.at_start["param"] if not is_adapter(name)]
    after, before = ({"param": {name: of["param"][name] for name in frozen}} for of in (found.state, found.at_start))
    require_same_state(
        "weights other than adapters, which are not trained, after the steps and before", after, before, ["param"]
    )
    assert_follows(found, plain)
    assert_same_metrics(found, plain)


@check("C72", level=1, needs=[Capability.LORA, Capability.BFLOAT16], builds_on=["C41", "C43"])
def test_only_adapters_have_masters_moments_and_gradients(subject: Subject) -> None:
    setup = adapted(subject.setup("qwen3"))
    setup = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    for rank in subject.run(sleeping.adapt, setup):
        require(
            rank.precisions == {"bfloat16"},
            f"the weights other than adapters are in {', '.join(sorted(rank.precisions))}, expected bfloat16, that of "
            "the passes",
        )
        require(
            rank.held <= rank.allowed,
            f"after a step the role holds {rank.held} bytes, expected at most {rank.allowed}: weights in bfloat16, and "
            "masters, gradients and moments of the adapters alone",
        )


@check("C75", level=1, needs=[Capability.LORA], builds_on=["C65", "C72"])
def test_ranks_with_frozen_weights_hold_what_the_spec_predicts(subject: Subject) -> None:
    if load(Kind.BACKENDS, subject.backend).spec.memory is None:
        pytest.skip("the backend's spec predicts no memory")
    setup = adapted(subject.setup("qwen3"), evolve(LORA, rank=4))  # which two ranks can divide
    held_as_predicted(subject, setup)


@check("C73", level=1, needs=[Capability.LORA], builds_on=["C21", "C72"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_engines_are_sent_the_weights_with_the_adapters_merged(subject: Subject, kind: str) -> None:
    _are_sent_merged(subject, kind, LORA)


@check("C73", level=1, needs=[Capability.LORA, Capability.EXPERT_LORA], builds_on=["C21", "C72"])
def test_engines_are_sent_experts_with_the_adapters_merged(subject: Subject) -> None:
    _are_sent_merged(subject, "qwen3-moe", EXPERTS)


def _are_sent_merged(subject: Subject, kind: str, lora: LoraConfig) -> None:
    ranks = subject.run(updates.push_weights, adapted(subject.setup(kind), lora), False)
    for sent, states in (
        (ranks[0].tensors, [rank.state for rank in ranks]),
        (ranks[0].tensors_then, [rank.state_then for rank in ranks]),
    ):
        held = whole(states)["param"]
        wanted = merged(held, LORA.scale)
        names = (dict.fromkeys(sorted(each)) for each in (sent, wanted))
        require_equal("the set of weights that engines are sent", *names)
        apart = weights_apart(sent, {name: held[name] for name in wanted})
        require(apart > 10 * MERGED, f"the weights as sent are {apart:.2g} from those without adapters: none is merged")
        for name, tensor in wanted.items():
            apart = float(np.linalg.norm(sent[name] - tensor) / np.linalg.norm(tensor))
            require(
                apart <= MERGED, f"{name} as sent is {apart:.2g} of its norm from W + scale B A, expected {MERGED:g}"
            )


@check("C74", level=1, needs=[Capability.LORA], builds_on=["C19", "C42", "C72"])
def test_checkpoints_have_adapters_alone_and_continue_in_the_plain_backend(subject: Subject) -> None:
    kind = "qwen3-tied"
    setup, plain = adapted(subject.setup(kind)), adapted(subject.runs.setup(PLAIN, kind, WHOLE))
    first, second = subject.checkpoint(1), Checkpoint(begin(subject.directory, 2), 1)
    start = subject.train(setup, range(1), save_after=0, save_to=first.role)
    middle = subject.runs.train(1, plain, range(1, 2), resume=first.complete(), save_after=1, save_to=second.role)
    resume = second.complete()
    end = subject.train(setup, range(2, STEPS), resume=resume)
    require_same_state("what plain has read, and what the backend has saved,", middle.at_start, start.state)
    require_same_state("what the backend has read, and what plain has saved,", end.at_start, middle.state)
    others = [name for name in CheckpointSource(resume, "master").shapes if not is_adapter(name)]
    require_equal("the list of weights in the checkpoint that are no adapters", others, [])
    undisturbed = subject.runs.trained_as(1, plain, STEPS)
    joined = start.losses + middle.losses + end.losses
    assert_losses("the run through both backends", joined, undisturbed.losses)
    assert_same_weights(end, undisturbed)


def merged(held: Mapping[str, Array], scale: float) -> Tensors:
    """W + scale B A of each weight, in float64."""
    found: Tensors = {}
    for name, weight in held.items():
        if is_adapter(name):
            continue
        a, b = (held.get(each) for each in adapters_of(name))
        found[name] = weight if a is None or b is None else weight + scale * (b.astype(np.float64) @ a)
    return found
