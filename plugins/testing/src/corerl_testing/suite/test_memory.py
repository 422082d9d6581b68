"""Residency: memory is freed by kind and restored to the last bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from attrs import evolve

from corerl.config.schema import Precision
from corerl.plugin import Capability, Kind, load
from corerl.types import MemoryKind
from corerl_testing.compare import (
    SAVED,
    grad_norm_of,
    loss_of,
    require_same_state,
    whole,
)
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import sleeping
from corerl_testing.subject import Subject
from corerl_testing.suite.test_errors import require_error

ENDS = list(MemoryKind)


@check("C43", level=1, needs=[Capability.SLEEP], builds_on=["C14"], variants={"down": ENDS, "up": ENDS})
@pytest.mark.parametrize(("down", "up"), [(ENDS, ENDS), (ENDS[::-1], ENDS), (ENDS[1:] + ENDS[:1], ENDS[::-1])])
def test_sleep_frees_what_it_says_and_waking_restores_every_bit(
    subject: Subject, down: Sequence[MemoryKind], up: Sequence[MemoryKind]
) -> None:
    setup = subject.setup("qwen3-tied")
    ranks = subject.run(sleeping.sleep_and_wake, setup, down, up, str(subject.directory / "actor"))
    for rank in ranks:
        freed = [result.freed_bytes for result in rank.sleeps]
        held = sum(rank.resident.values())
        require(
            sum(freed) == held,
            f"sleep says that it freed {sum(freed)} bytes, but tensors(kind) of all kinds held {held}",
        )
        require(
            held >= rank.state_bytes,
            f"tensors(kind) of all kinds hold {held} bytes, but weights and moments of local_state {rank.state_bytes}: "
            "name what holds them in tensors()",
        )
        asleep = dict(zip(down, rank.resident_asleep, strict=True))
        require_equal("bytes of tensors(kind) once it sleeps", asleep, dict.fromkeys(down, 0))
        require_equal("bytes of weights and moments of local_state while all sleeps", rank.state_bytes_asleep, 0)
        require_equal("bytes that a second sleep says it freed", rank.again.freed_bytes, 0)
        # If it were less, the first sleep would wait for host memory; if more, that memory would be wasted.
        copied = sum(freed) - freed[down.index(MemoryKind.GRAD)]
        require(
            rank.expected_bytes == pytest.approx(copied, rel=0.1),
            f"{rank.expected_bytes} bytes of host memory were reserved before the first step, but sleep copied "
            f"{copied}; moments_to_come() must return the bytes of the moments that the first step creates",
        )
        # Host copies replace what sleeps, but for gradients, which have none; a storage that someone keeps would add.
        allowed = rank.alive - freed[down.index(MemoryKind.GRAD)]
        require(
            rank.alive_asleep <= allowed,
            f"all tensors of the process take {rank.alive_asleep} bytes while all kinds sleep, host copies among them, "
            f"expected at most {allowed}, those of awake without gradients: something keeps a copy of what sleeps",
        )
        require(
            rank.gradients_asleep == 0,
            f"gradients of {rank.gradients_asleep} bytes stay while all kinds sleep; free them in optimizer_step, as "
            "zero_grad(set_to_none=True) does, or give them in tensors(MemoryKind.GRAD)",
        )
        woken = {kind: result.restored_bytes for kind, result in zip(up, rank.wakes, strict=True)}
        require_equal("restored_bytes", woken, {kind: freed[down.index(kind)] for kind in up})
        for verb, error in rank.refused.items():
            require_error(f"{verb} while all kinds sleep", error, "NotResident: ")
    after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
    require_same_state("the state after waking and before sleeping", after, before, [*SAVED, "param"])
    awake = subject.undisturbed(setup, 4)
    steps = list(zip(*(rank.then for rank in ranks), strict=True))
    for what, of, wanted in (("losses", loss_of, awake.losses), ("gradient norms", grad_norm_of, awake.grad_norms)):
        which = f"the list of {what} of steps after waking, with the same weights and moments as before it,"
        require_equal(which, [of(results) for results in steps], wanted[2:])
    end = whole([rank.end for rank in ranks])
    require_same_state("the state of the run that slept and of one that did not", end, awake.state)


@check("C65", level=1, builds_on=["C41"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_ranks_hold_of_each_kind_what_the_spec_predicts(subject: Subject, kind: str) -> None:
    memory = load(Kind.BACKENDS, subject.backend).spec.memory
    if memory is None:
        pytest.skip("the backend's spec predicts no memory")
    held_as_predicted(subject, subject.setup(kind))


def held_as_predicted(subject: Subject, setup: Setup) -> None:
    """After a step, ranks hold of each kind what the spec predicts."""
    found = subject.run(sleeping.held_after_a_step, setup)
    for each in MemoryKind:
        held, predicted = max(held[each] for held, _ in found), found[0][1].get(each, 0)
        if each is MemoryKind.GRAD and not held:
            continue  # they do not outlive the step
        require(
            predicted == pytest.approx(held, rel=0.1),
            f"a rank holds {held} bytes of {each} after a step, but the spec's memory() predicts {predicted}",
        )


@check("C58", level=1, needs=[Capability.SLEEP], builds_on=["C43"])
def test_forward_and_updates_need_parameters_alone(subject: Subject) -> None:
    outputs_with_parameters_alone(subject, "float32")


@check("C58", level=1, needs=[Capability.SLEEP, Capability.BFLOAT16], builds_on=["C43", "C55"])
def test_they_do_where_masters_of_higher_precision_sleep_too(subject: Subject) -> None:
    half, single = (outputs_with_parameters_alone(subject, precision) for precision in ("bfloat16", "float32"))
    require(half != single, "outputs in bfloat16 are to the last bit those in float32: train.precision is ignored")


def outputs_with_parameters_alone(subject: Subject, precision: Precision) -> list[Mapping[str, bytes]]:
    """Each rank's outputs of a forward pass with only parameters awake."""
    setup = subject.setup("qwen3")
    setup = evolve(setup, train=evolve(setup.train, precision=precision))
    ranks = subject.run(sleeping.sleep_partly, setup, str(subject.directory / "actor"))
    for rank in ranks:
        for verb in ("forward", "update_weights"):
            require_equal(f"the error of {verb} with parameters alone awake", rank.errors[verb], "")
        require(
            rank.asleep == rank.awake,
            "outputs or sent weights with parameters alone awake differ from those with all kinds awake: forward or "
            "update_weights read masters, which sleep",
        )
        for verb in ("forward_backward", "save"):
            what = f"{verb} with parameters alone awake"
            require_error(what, rank.errors[verb], f"NotResident: {verb} ", "optimizer")
    return [rank.awake.outputs for rank in ranks]
