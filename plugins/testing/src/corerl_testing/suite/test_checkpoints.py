"""A saved run resumes as if uninterrupted: here, on other ranks, and in the plain backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from corerl.checkpoint.commit import begin, latest
from corerl.checkpoint.reader import CheckpointSource
from corerl.errors import SaveFailed
from corerl.plugin.capabilities import Capability
from corerl_testing.compare import (
    SAVED,
    different,
    saved_tensors,
    weights_apart,
    whole,
)
from corerl_testing.marks import check
from corerl_testing.pool import RankPool
from corerl_testing.scenarios import saving, states
from corerl_testing.subject import PLAIN, STEPS, WHOLE, Checkpoint, Subject
from corerl_testing.tolerances import LOSS, WEIGHTS_L2


@check("C18", level=1, builds_on=["C14"], variants={"kind": "qwen3-tied"})
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(subject: Subject, kind: str) -> None:
    setup, checkpoint = subject.setup(kind), subject.checkpoint(2)
    uninterrupted = subject.train(setup, range(4), save_after=1, save_to=checkpoint.role)
    resumed = subject.train(setup, range(2, 4), resume=checkpoint.complete())
    assert resumed.optimizer_step == 2 and resumed.adam_step == 4
    assert resumed.losses == uninterrupted.losses[2:]
    assert resumed.grad_norms == uninterrupted.grad_norms[2:]
    assert different(resumed.state, uninterrupted.state) == []


@check("C18", level=1, needs=[Capability.BFLOAT16], builds_on=["C14"])
def test_a_resumed_run_in_bfloat16_equals_the_uninterrupted_one_too(subject: Subject) -> None:
    setup, checkpoint = subject.setup("qwen3-tied"), subject.checkpoint(2)
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    uninterrupted = subject.train(half, range(4), save_after=1, save_to=checkpoint.role)
    resumed = subject.train(half, range(2, 4), resume=checkpoint.complete())
    assert resumed.losses == uninterrupted.losses[2:]
    assert different(resumed.state, uninterrupted.state) == []
    assert uninterrupted.losses != subject.losses(setup, 4)  # the precision matters


@check("C30", level=2, needs=[Capability.RESHARD, Capability.MULTI_RANK], builds_on=["C18", "C41"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_a_run_resumes_on_another_number_of_ranks(subject: Subject, kind: str) -> None:
    (other,) = subject.runs.rank_sets.keys() - {subject.world_size}
    subject.require_ranks(other)
    setup, checkpoint = subject.setup(kind), subject.checkpoint(3)
    at_save = subject.train(setup, range(3), save_after=2, save_to=checkpoint.role)
    resumed = subject.runs.train(other, setup, range(3, STEPS), resume=checkpoint.complete())
    assert different(resumed.at_start, at_save.state) == []
    uninterrupted = subject.runs.trained(PLAIN, 1, kind, WHOLE)
    joined = at_save.losses + resumed.losses
    assert joined == pytest.approx(uninterrupted.losses, rel=LOSS.relative, abs=LOSS.absolute)
    assert weights_apart(resumed.state["master"], uninterrupted.state["master"]) < WEIGHTS_L2


@check("C42", level=1, builds_on=["C18", "C41"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_the_checkpoint_goes_on_in_the_plain_backend_and_back(subject: Subject, kind: str) -> None:
    setup, first, second = subject.setup(kind), subject.checkpoint(2), Checkpoint(begin(subject.directory, 4), 1)
    start = subject.train(setup, range(2), save_after=1, save_to=first.role)
    middle = subject.runs.train(
        1,
        subject.runs.setup(PLAIN, kind),
        range(2, 4),
        resume=first.complete(),
        save_after=3,
        save_to=second.role,
    )
    end = subject.train(setup, range(4, STEPS), resume=second.complete())
    assert different(middle.at_start, start.state) == []
    assert different(end.at_start, middle.state) == []
    assert (middle.optimizer_step, end.optimizer_step, end.adam_step) == (2, 4, STEPS)
    uninterrupted = subject.runs.trained(PLAIN, 1, kind, WHOLE)
    joined = start.losses + middle.losses + end.losses
    assert joined == pytest.approx(uninterrupted.losses, rel=LOSS.relative, abs=LOSS.absolute)
    assert weights_apart(end.state["master"], uninterrupted.state["master"]) < WEIGHTS_L2


@check("C20", level=1, needs=[Capability.SAVE_BACKGROUND], builds_on=["C18"])
def test_a_background_save_holds_what_was_there_when_it_began(subject: Subject) -> None:
    checkpoint = subject.checkpoint(1)
    ranks = subject.run(saving.save_in_background, subject.setup("qwen3"), checkpoint.role)
    for rank in ranks:
        assert (rank.complete, rank.while_held, rank.when_released) == (False, False, True)
        assert rank.files_while_held == []
    at_save = whole([rank.at_save for rank in ranks])
    directory = checkpoint.complete()
    saved = {key: saved_tensors(CheckpointSource(directory, key)) for key in SAVED}
    assert different(saved, at_save) == []
    after = different(whole([rank.after_step for rank in ranks]), at_save)
    assert len(after) == sum(len(at_save[key]) for key in SAVED)  # all of it had changed before it was written


@check("C20", level=1, needs=[Capability.SAVE_BACKGROUND], builds_on=["C18"])
def test_a_background_save_that_fails_says_so_once_and_the_next_one_is_written(subject: Subject) -> None:
    blocked = subject.directory / "blocked"
    blocked.write_text("a file where a directory is needed")
    ranks = subject.run(saving.fail_to_save_in_background, subject.setup("qwen3"), str(blocked))
    for failure, next_save in ranks:
        assert failure.startswith("SaveFailed: the background save failed: cannot write") and str(blocked) in failure
        assert next_save == ""


@check("C19", level=1, builds_on=["C18"], ranks=[1])
def test_a_save_that_is_killed_midway_leaves_the_one_before_and_is_taken_for_no_checkpoint(subject: Subject) -> None:
    assert_the_one_before_is_left(subject, background=False)


@check("C19", level=1, needs=[Capability.SAVE_BACKGROUND], builds_on=["C18", "C20"])
def test_a_background_save_that_is_killed_midway_leaves_the_one_before_and_is_taken_for_no_checkpoint(
    subject: Subject,
) -> None:
    assert_the_one_before_is_left(subject, background=True)


def assert_the_one_before_is_left(subject: Subject, *, background: bool) -> None:
    """Kill all ranks while rank 0 is at its last file and the others have written theirs; the save before must stay."""
    setup, before, cut = subject.setup("qwen3"), subject.checkpoint(1), subject.checkpoint(2)
    ranks = RankPool(subject.world_size)
    try:
        at_save = whole(ranks.run(saving.save_and_be_held, setup, before.role, cut.role, background))
    finally:
        ranks.close()  # by SIGKILL
    assert any(path.stat().st_size for path in Path(cut.role).iterdir())
    with pytest.raises(SaveFailed):
        cut.complete()
    for refused in subject.run(states.start_refused, setup, cut.role):
        assert refused.startswith("CheckpointDamaged: ")
    checkpoint = Path(before.complete())
    assert latest(subject.directory) == checkpoint.parent
    resumed, undisturbed = subject.train(setup, range(1, 3), resume=str(checkpoint)), subject.undisturbed(setup, 3)
    assert different(resumed.at_start, at_save) == []
    assert resumed.losses == undisturbed.losses[1:]
    assert different(resumed.state, undisturbed.state) == []
