"""Adapters in place of all weights: trained as the plain backend trains them, alone, and sent merged."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from attrs import evolve

from corerl.checkpoint.commit import begin
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import LoraConfig
from corerl.plugin.capabilities import Capability
from corerl.plugin.registry import Kind, load
from corerl.types import Array
from corerl.weights.adapters import adapters_of, is_adapter
from corerl_testing.compare import SAVED, Tensors, assert_follows, assert_same_metrics, different, weights_apart, whole
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.scenarios import adapting, updates
from corerl_testing.subject import PLAIN, WHOLE, Checkpoint, Subject
from corerl_testing.suite.test_memory import held_as_predicted
from corerl_testing.tolerances import LOSS, WEIGHTS_L2

# No value is a default, nothing divides the rank, and the scale is no power of two.
LORA = LoraConfig(rank=3, alpha=7.0).settled({})
SOME = evolve(LORA, rslora=True, init="gaussian", targets=("q_proj", "v_proj", "down_proj"))
STEPS = 3
MERGED = 1e-6  # relative L2: a sum in float32, of a product that may be summed in another order


def adapted(setup: Setup, lora: LoraConfig = LORA) -> Setup:
    return evolve(setup, lora=lora)


@check("C72", level=1, needs=[Capability.LORA], builds_on=["C41", "C61"], variants={"kind": "qwen3-tied", "lora": LORA})
@pytest.mark.parametrize(
    ("kind", "lora"), [("qwen3-tied", LORA), ("qwen2", LORA), ("qwen3-moe", LORA), ("llama", SOME)]
)
def test_adapters_train_as_the_plain_backends_and_all_else_stays(subject: Subject, kind: str, lora: LoraConfig) -> None:
    found = subject.train(adapted(subject.setup(kind), lora), range(STEPS))
    plain = subject.runs.trained_as(1, adapted(subject.runs.setup(PLAIN, kind, WHOLE), lora), STEPS)
    for key in SAVED:
        assert found.state[key].keys() == plain.state[key].keys(), (
            f"local_state({key!r}) has other tensors than the adapters, by the names of corerl.weights.adapters"
        )
    assert_follows(found, plain)
    assert_same_metrics(found, plain)
    frozen = [name for name in found.at_start["param"] if not is_adapter(name)]
    assert (
        different(
            {"param": {name: found.state["param"][name] for name in frozen}},
            {"param": {name: found.at_start["param"][name] for name in frozen}},
            ["param"],
        )
        == []
    ), "weights have changed that have only adapters to train"


@check("C72", level=1, needs=[Capability.LORA, Capability.BFLOAT16], builds_on=["C41", "C43"])
def test_only_adapters_have_masters_moments_and_gradients(subject: Subject) -> None:
    setup = adapted(subject.setup("qwen3"))
    setup = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    for rank in subject.run(adapting.adapt, setup):
        assert rank.precisions == {"bfloat16"}, (
            f"the weights beside adapters are in {', '.join(sorted(rank.precisions))}, expected those of the passes"
        )
        assert rank.held <= rank.allowed, (
            f"after a step the role holds {rank.held} bytes, expected at most {rank.allowed}: weights in bfloat16, and "
            "masters, gradients and moments of the adapters alone"
        )


@check("C75", level=1, needs=[Capability.LORA], builds_on=["C65", "C72"])
def test_ranks_hold_beside_frozen_weights_what_the_spec_predicts(subject: Subject) -> None:
    if load(Kind.BACKENDS, subject.backend).spec.memory is None:
        pytest.skip("the backend's spec predicts no memory")
    setup = adapted(subject.setup("qwen3"), evolve(LORA, rank=4))  # which two ranks can divide
    held_as_predicted(subject, setup)


@check("C73", level=1, needs=[Capability.LORA], builds_on=["C21", "C72"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_engines_are_sent_the_weights_with_the_adapters_merged(subject: Subject, kind: str) -> None:
    ranks = subject.run(updates.push_weights, adapted(subject.setup(kind)), False)
    for sent, states in (
        (ranks[0].tensors, [rank.state for rank in ranks]),
        (ranks[0].tensors_then, [rank.state_then for rank in ranks]),
    ):
        held = whole(states)["param"]
        wanted = merged(held, LORA.scale)
        assert sent.keys() == wanted.keys()
        assert weights_apart(sent, {name: held[name] for name in wanted}) > 10 * MERGED  # the adapters matter
        for name, tensor in wanted.items():
            apart = float(np.linalg.norm(sent[name] - tensor) / np.linalg.norm(tensor))
            assert apart <= MERGED, f"{name} as sent is {apart:.2g} from W + scale B A"


@check("C74", level=1, needs=[Capability.LORA], builds_on=["C19", "C42", "C72"])
def test_adapters_go_on_in_the_plain_backend_and_back_and_their_checkpoint_has_nothing_else(subject: Subject) -> None:
    kind = "qwen3-tied"
    setup, plain = adapted(subject.setup(kind)), adapted(subject.runs.setup(PLAIN, kind, WHOLE))
    first, second = subject.checkpoint(1), Checkpoint(begin(subject.directory, 2), 1)
    start = subject.train(setup, range(1), save_after=0, save_to=first.role)
    middle = subject.runs.train(1, plain, range(1, 2), resume=first.complete(), save_after=1, save_to=second.role)
    resume = second.complete()
    end = subject.train(setup, range(2, STEPS), resume=resume)
    assert different(middle.at_start, start.state) == []
    assert different(end.at_start, middle.state) == []
    assert all(map(is_adapter, CheckpointSource(resume, "master").shapes))
    undisturbed = subject.runs.trained_as(1, plain, STEPS)
    joined = start.losses + middle.losses + end.losses
    assert joined == pytest.approx(undisturbed.losses, rel=LOSS.relative, abs=LOSS.absolute)
    assert weights_apart(end.state["master"], undisturbed.state["master"]) < WEIGHTS_L2


def merged(held: Mapping[str, Array], scale: float) -> Tensors:
    """W + scale B A of each weight, in float64."""
    found: Tensors = {}
    for name, weight in held.items():
        if is_adapter(name):
            continue
        a, b = (held.get(each) for each in adapters_of(name))
        found[name] = weight if a is None or b is None else weight + scale * (b.astype(np.float64) @ a)
    return found
