"""Residency: memory is freed by kind and restored to the last bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from attrs import evolve

from corerl.config.schema import Precision
from corerl.plugin.capabilities import Capability
from corerl.plugin.registry import Kind, load
from corerl.types import MemoryKind
from corerl_testing.compare import (
    SAVED,
    different,
    grad_norm_of,
    loss_of,
    whole,
)
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.scenarios import sleeping
from corerl_testing.subject import Subject

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
        assert sum(freed) == sum(rank.resident.values()) >= rank.state_bytes
        assert rank.resident_asleep == [0] * len(down) and rank.state_bytes_asleep == 0
        assert rank.again.freed_bytes == 0
        # If it were less, the first sleep would wait for host memory; if more, that memory would be wasted.
        copied = sum(freed) - freed[down.index(MemoryKind.GRAD)]
        assert rank.expected_bytes == pytest.approx(copied, rel=0.1), (
            f"{rank.expected_bytes} bytes of host memory were reserved before the first step, but sleep copied "
            f"{copied}; moments_to_come() must return the bytes of the moments that the first step creates"
        )
        # Host copies replace what sleeps; a storage that someone keeps would add to them.
        assert rank.alive_asleep <= rank.alive
        assert rank.gradients_asleep == 0, (
            f"gradients of {rank.gradients_asleep} bytes stay while all kinds sleep; free them in optimizer_step, as "
            "zero_grad(set_to_none=True) does, or give them in tensors(MemoryKind.GRAD)"
        )
        assert [result.restored_bytes for result in rank.wakes] == [freed[down.index(kind)] for kind in up]
        assert {verb for verb, error in rank.refused.items() if not error.startswith("NotResident: ")} == set()
    after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
    assert different(after, before, [*SAVED, "param"]) == []
    awake = subject.undisturbed(setup, 4)
    steps = list(zip(*(rank.then for rank in ranks), strict=True))
    assert [loss_of(results) for results in steps] == awake.losses[2:]
    assert [grad_norm_of(results) for results in steps] == awake.grad_norms[2:]
    assert different(whole([rank.end for rank in ranks]), awake.state) == []


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
        assert predicted == pytest.approx(held, rel=0.1), (
            f"a rank holds {held} bytes of {each} after a step, but the spec's memory() predicts {predicted}"
        )


@check("C58", level=1, needs=[Capability.SLEEP], builds_on=["C43"])
def test_forward_and_updates_go_on_with_parameters_alone_and_what_needs_more_is_refused(subject: Subject) -> None:
    outputs_with_parameters_alone(subject, "float32")


@check("C58", level=1, needs=[Capability.SLEEP, Capability.BFLOAT16], builds_on=["C43", "C55"])
def test_they_do_where_masters_of_higher_precision_sleep_too(subject: Subject) -> None:
    half, single = (outputs_with_parameters_alone(subject, precision) for precision in ("bfloat16", "float32"))
    assert half != single  # the precision matters


def outputs_with_parameters_alone(subject: Subject, precision: Precision) -> list[Mapping[str, bytes]]:
    """Each rank's outputs of a forward pass with only parameters awake."""
    setup = subject.setup("qwen3")
    setup = evolve(setup, train=evolve(setup.train, precision=precision))
    ranks = subject.run(sleeping.sleep_partly, setup, str(subject.directory / "actor"))
    for rank in ranks:
        assert (rank.errors["forward"], rank.errors["update_weights"]) == ("", "")
        assert rank.asleep == rank.awake
        for verb in ("forward_backward", "save"):
            assert rank.errors[verb].startswith(f"NotResident: {verb} ") and "optimizer" in rank.errors[verb]
    return [rank.awake.outputs for rank in ranks]
