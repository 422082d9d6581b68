"""The outputs of a forward pass, under the current weights and under snapshots."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from corerl.plugin.capabilities import Capability
from corerl.types import FloatArray, Output
from corerl_testing.compare import (
    SAVED,
    assert_outputs,
    different,
    in_order,
    loss_of,
    transformers_outputs,
    whole,
)
from corerl_testing.harness import make_samples
from corerl_testing.marks import check
from corerl_testing.scenarios import snapshots, training
from corerl_testing.subject import PACKINGS, Subject


@check("C51", level=1, builds_on=["C11"])
@pytest.mark.parametrize(
    ("kind", "packing"),
    [*((kind, "packed") for kind in ("qwen3", "qwen3-tied", "qwen2", "llama", "qwen3-moe")), ("qwen3", "padded")],
)
def test_forward_gives_what_transformers_gives_in_the_samples_order(subject: Subject, kind: str, packing: str) -> None:
    samples = make_samples(7, samples=13)
    results = subject.run(training.forward_only, subject.setup(kind, PACKINGS[packing]), samples)
    wanted = transformers_outputs(subject.model(kind), samples)
    for output in (Output.LOGPROBS, Output.ENTROPY):
        found = in_order(results, samples, output)
        assert_outputs(found, wanted[output], samples, output)
        assert (found[samples.offsets[:-1]] == 0).all()  # the first token is not predicted


@check(
    "C48",
    level=1,
    needs=[Capability.SNAPSHOTS],
    builds_on=["C14", "C51"],
    variants={"kind": "qwen3-tied"},
)
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_snapshots_answer_for_the_weights_they_were_made_of_and_leave_the_current_ones_alone(
    subject: Subject, kind: str
) -> None:
    samples, setup = make_samples(11), subject.setup(kind)
    other = subject.runs.other(kind)
    ranks = subject.run(snapshots.use_snapshots, setup, samples, str(other))

    def logprobs(part: str) -> FloatArray:
        return in_order([getattr(rank, part) for rank in ranks], samples, Output.LOGPROBS)

    assert np.array_equal(logprobs("kept"), logprobs("first"))
    assert np.array_equal(logprobs("started_from"), logprobs("first"))
    wanted = transformers_outputs(other, samples)[Output.LOGPROBS]
    assert_outputs(logprobs("other"), wanted, samples, Output.LOGPROBS)
    assert np.abs(logprobs("current") - logprobs("first")).max() > 1e-2
    after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
    assert different(after, before, [*SAVED, "param"]) == []
    assert loss_of([rank.then for rank in ranks]) == subject.losses(setup, 4)[3]
    assert subject.world_size > 1 or "Fault: no such batch" in ranks[0].failed
    for rank in ranks:  # rank and hook are in between
        kind, _, message = rank.dropped.partition(": ")
        assert kind == "WrongState"
        assert message.endswith("no snapshot 'reference'; known: other, start; create or load it first")


@check("C48", level=1, needs=[Capability.SNAPSHOTS, Capability.BFLOAT16], builds_on=["C14", "C51"])
def test_snapshots_round_nothing_of_a_model_in_bfloat16(subject: Subject) -> None:
    samples, setup = make_samples(11), subject.setup("qwen3-tied")
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    other = subject.runs.other("qwen3-tied")
    ranks = subject.run(snapshots.use_snapshots, half, samples, str(other))
    after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
    assert different(after, before, [*SAVED, "param"]) == []
    undisturbed = subject.losses(half, 4)
    assert loss_of([rank.then for rank in ranks]) == undisturbed[3]
    assert undisturbed != subject.losses(setup, 4)  # the precision matters
