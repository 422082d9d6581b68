"""The outputs of a forward pass, under the current weights and under snapshots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from safetensors.torch import load_file

from corerl.plugin import Capability
from corerl.types import TARGETS, FloatArray, Output, SampleBatch
from corerl_testing.causes import Mismatch
from corerl_testing.compare import (
    SAVED,
    assert_outputs,
    in_order,
    loss_of,
    require_same_state,
    transformers_outputs,
    whole,
)
from corerl_testing.harness import LONG, Setup, make_branches, make_samples, with_targets
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import snapshots, training
from corerl_testing.subject import PACKINGS, WHOLE, Subject

CURRENT = "the current weights after snapshots were used, and before,"


@check("C51", level=1, builds_on=["C11"])
@pytest.mark.parametrize(
    ("kind", "packing"),
    [*((kind, "packed") for kind in ("qwen3", "qwen3-tied", "qwen2", "llama", "qwen3-moe")), ("qwen3", "padded")],
)
def test_forward_gives_what_transformers_gives_in_the_samples_order(subject: Subject, kind: str, packing: str) -> None:
    assert_forward_as_transformers(subject, subject.setup(kind, PACKINGS[packing]), make_samples(7, samples=13))


@check("C51", level=1, builds_on=["C11"])
def test_long_sequences_packed_together_do_not_see_each_other(subject: Subject) -> None:
    assert_forward_as_transformers(subject, subject.setup("qwen3", WHOLE), make_samples(7, lengths=LONG))


def assert_forward_as_transformers(subject: Subject, setup: Setup, samples: SampleBatch) -> None:
    """Outputs are those of transformers, from all logits of each sample by itself."""
    results = subject.run(training.forward_only, setup, samples)
    wanted = transformers_outputs(Path(setup.model), samples)
    for output in (Output.LOGPROBS, Output.ENTROPY):
        found = in_order(results, samples, output)
        try:
            assert_outputs(found, wanted[output], samples, output)
        except AssertionError as error:
            if output is not Output.LOGPROBS:
                raise Mismatch(f"{error}; log-probs agree, so look at what is done for {output} alone") from None
            if reason := _reason(subject, setup, samples, found):
                raise Mismatch(f"{error}{reason}") from None
            raise
        first = found[samples.offsets[:-1]]
        require(
            not first.any(), f"{output} of samples' first tokens are {first}, expected 0: nothing predicts these tokens"
        )


@check("C81", level=1, needs=[Capability.TARGETS], builds_on=["C51"], variants={"several": (3,)})
@pytest.mark.parametrize("several", [(3,), ()], ids=["several", "one"])
def test_logprobs_are_those_of_the_targets_in_the_batch(subject: Subject, several: tuple[int, ...]) -> None:
    setup, samples = subject.setup("qwen3", PACKINGS["padded"]), with_targets(make_samples(7, samples=13), *several)
    results = subject.run(training.forward_only, setup, samples)
    wanted = transformers_outputs(Path(setup.model), samples)
    found = in_order(results, samples, Output.LOGPROBS)
    require_equal(
        "the shape of log-probs, which is that of the column targets,", found.shape, samples.columns[TARGETS].shape
    )
    for mine, theirs in zip(*(each.reshape(len(each), -1).T for each in (found, wanted[Output.LOGPROBS])), strict=True):
        assert_outputs(mine, theirs, samples, Output.LOGPROBS)
    assert_outputs(in_order(results, samples, Output.ENTROPY), wanted[Output.ENTROPY], samples, Output.ENTROPY)


@check("C82", level=1, needs=[Capability.SHARED_PREFIXES], builds_on=["C51"], variants={})
def test_samples_that_begin_alike_get_their_own_outputs(subject: Subject) -> None:
    assert_forward_as_transformers(subject, subject.setup("qwen3").with_prefixes, make_branches(7))


def _reason(subject: Subject, setup: Setup, samples: SampleBatch, found: FloatArray) -> str:
    """What makes log-probs wrong, where another pass shows it; "" if none does."""
    again = in_order(subject.run(training.forward_only, setup, samples), samples, Output.LOGPROBS)
    if not np.array_equal(again, found):
        return "; another worker's pass gives other ones: look at dropout and other random numbers"
    undivided = evolve(samples, temperature=1.0)
    try:
        assert_outputs(
            found, transformers_outputs(Path(setup.model), undivided)[Output.LOGPROBS], samples, Output.LOGPROBS
        )
    except AssertionError:
        return ""
    return f"; they are right for a temperature of 1: divide logits by the batch's, which is {samples.temperature:g}"


@check(
    "C48",
    level=1,
    needs=[Capability.SNAPSHOTS],
    builds_on=["C14", "C21", "C51"],
    variants={"kind": "qwen3-tied"},
)
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_snapshots_keep_their_weights_and_leave_the_current_ones_alone(subject: Subject, kind: str) -> None:
    samples, setup = make_samples(11), subject.setup(kind)
    other = subject.runs.other(kind)
    ranks = subject.run(snapshots.use_snapshots, setup, samples, str(other))

    def logprobs(part: str) -> FloatArray:
        return in_order([getattr(rank, part) for rank in ranks], samples, Output.LOGPROBS)

    for part, snapshot in (("kept", "made of"), ("started_from", "named 'start', of")):
        apart = float(np.abs(logprobs(part) - logprobs("first")).max())
        if apart and np.array_equal(logprobs(part), logprobs("current")):
            raise Mismatch(
                f"log-probs of a snapshot {snapshot} the initial weights are those of the weights three steps later: "
                "it shares memory with them, or is not put in their place"
            )
        require_equal(f"the largest difference of log-probs of a snapshot {snapshot} the initial weights", apart, 0.0)
    wanted = transformers_outputs(other, samples)[Output.LOGPROBS]
    assert_outputs(logprobs("other"), wanted, samples, Output.LOGPROBS)
    read = [load_file(path) for path in other.glob("*.safetensors")]
    files = {name: value.float().numpy() for part in read for name, value in part.items()}
    what = "weights that an engine is sent of a snapshot, and those of the directory that it was loaded from,"
    require_same_state(what, {"sent": dict(ranks[0].sent)}, {"sent": files}, ["sent"])
    moved = float(np.abs(logprobs("current") - logprobs("first")).max())
    require(
        moved > 1e-2,
        f"after three steps log-probs of the current weights differ by {moved} from the first ones: the snapshot stays "
        "in the model's place",
    )
    after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
    require_same_state(CURRENT, after, before, [*SAVED, "param"])
    found = loss_of([rank.then for rank in ranks])
    require_equal("the loss of the step after snapshots were used", found, subject.losses(setup, 4)[3])
    failed = ranks[0].failed
    require(
        subject.world_size > 1 or "Fault: no such batch" in failed,
        f"a pass under a snapshot, whose batch raises Fault('no such batch'), gave {failed or 'no error'!r}",
    )
    for rank in ranks:  # rank and hook are in between
        kind, _, message = rank.dropped.partition(": ")
        known = "no snapshot 'reference'; known: other, start; create or load it first"
        require(
            kind == "WrongState" and message.endswith(known),
            f"forward under a dropped snapshot gave {rank.dropped or 'no error'!r}, expected WrongState: ... {known}",
        )


@check("C48", level=1, needs=[Capability.SNAPSHOTS, Capability.BFLOAT16], builds_on=["C14", "C51"])
def test_snapshots_round_nothing_of_a_model_in_bfloat16(subject: Subject) -> None:
    samples, setup = make_samples(11), subject.setup("qwen3-tied")
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    other = subject.runs.other("qwen3-tied")
    ranks = subject.run(snapshots.use_snapshots, half, samples, str(other))
    after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
    require_same_state(CURRENT, after, before, [*SAVED, "param"])
    undisturbed = subject.losses(half, 4)
    found = loss_of([rank.then for rank in ranks])
    require_equal("the loss of the step after snapshots were used, in bfloat16,", found, undisturbed[3])
    require(
        undisturbed != subject.losses(setup, 4),
        f"the losses in bfloat16 are those in float32, {undisturbed}: train.precision is ignored",
    )
