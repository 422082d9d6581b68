"""A saved run resumes as if uninterrupted: here, on other ranks, and in the plain backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from attrs import evolve
from safetensors.numpy import save_file

from corerl.checkpoint import CheckpointSource, begin
from corerl.checkpoint.commit import latest
from corerl.errors import SaveFailed
from corerl.plugin import Capability
from corerl_testing.compare import (
    SAVED,
    assert_losses,
    assert_resumes,
    assert_same_weights,
    different,
    require_same_state,
    saved_tensors,
    whole,
)
from corerl_testing.marks import check
from corerl_testing.pool import RankPool
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import saving, states
from corerl_testing.subject import PLAIN, STEPS, WHOLE, Checkpoint, Subject


@check("C18", level=1, builds_on=["C14"], variants={"kind": "qwen3-tied"})
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_a_resumed_run_equals_the_uninterrupted_one(subject: Subject, kind: str) -> None:
    setup, checkpoint = subject.setup(kind), subject.checkpoint(2)
    uninterrupted = subject.train(setup, range(4), save_after=1, save_to=checkpoint.role)
    complete = checkpoint.complete()
    resumed = subject.train(setup, range(2, 4), resume=complete)
    assert_resumes(resumed, uninterrupted, saved=2, checkpoint=complete)


@check("C18", level=1, needs=[Capability.BFLOAT16], builds_on=["C14"])
def test_a_resumed_run_in_bfloat16_equals_the_uninterrupted_one_too(subject: Subject) -> None:
    setup, checkpoint = subject.setup("qwen3-tied"), subject.checkpoint(2)
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    uninterrupted = subject.train(half, range(4), save_after=1, save_to=checkpoint.role)
    resumed = subject.train(half, range(2, 4), resume=checkpoint.complete())
    assert_resumes(resumed, uninterrupted, saved=2)
    require(
        uninterrupted.losses != subject.losses(setup, 4),
        f"the losses in bfloat16 are those in float32, {uninterrupted.losses}: train.precision is ignored",
    )


@check("C80", level=1, builds_on=["C18"], variants={})
def test_weights_without_their_moments_begin_a_new_optimizer(subject: Subject) -> None:
    setup, checkpoint = subject.setup("qwen3-tied"), subject.checkpoint(2)
    subject.train(setup, range(2), save_after=1, save_to=checkpoint.role)
    directory = checkpoint.complete()
    found = subject.train(evolve(setup, moments=False), range(2), resume=directory)
    # What it must equal to the last bit: a run of a model that has these weights.
    model = subject.directory / "model"
    model.mkdir()
    shutil.copy(subject.model("qwen3-tied") / "config.json", model)
    save_file(saved_tensors(CheckpointSource(directory, "master")), model / "model.safetensors")
    wanted = subject.train(evolve(setup, model=str(model)), range(2))
    counted = (found.optimizer_step, found.adam_step)
    require_equal("the list of optimizer_step in InitResult and of adam_step after two steps", counted, (0, 2))
    for when, mine, others in (
        ("at the start", found.at_start, wanted.at_start),
        ("after two steps", found.state, wanted.state),
    ):
        what = f"the state {when} of a run with a checkpoint's weights alone, and of one whose model has these weights,"
        require_same_state(what, mine, others)


@check("C30", level=2, needs=[Capability.RESHARD, Capability.MULTI_RANK], builds_on=["C18", "C41"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_a_run_resumes_on_another_number_of_ranks(subject: Subject, kind: str) -> None:
    (other,) = subject.runs.rank_sets.keys() - {subject.world_size}
    subject.require_ranks(other)
    setup, checkpoint = subject.setup(kind), subject.checkpoint(3)
    at_save = subject.train(setup, range(3), save_after=2, save_to=checkpoint.role)
    resumed = subject.runs.train(other, setup, range(3, STEPS), resume=checkpoint.complete())
    read = f"the state that {other} rank(s) have read, and the one that {subject.world_size} have saved,"
    require_same_state(read, resumed.at_start, at_save.state)
    uninterrupted = subject.runs.trained(PLAIN, 1, kind, WHOLE)
    assert_losses("the run on both numbers of ranks", at_save.losses + resumed.losses, uninterrupted.losses)
    assert_same_weights(resumed, uninterrupted)


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
    require_same_state("what plain has read, and what the backend has saved,", middle.at_start, start.state)
    require_same_state("what the backend has read, and what plain has saved,", end.at_start, middle.state)
    steps = (middle.optimizer_step, end.optimizer_step, end.adam_step)
    require_equal("optimizer_step in plain and back, and adam_step at the end,", steps, (2, 4, STEPS))
    uninterrupted = subject.runs.trained(PLAIN, 1, kind, WHOLE)
    joined = start.losses + middle.losses + end.losses
    assert_losses("the run through both backends", joined, uninterrupted.losses)
    assert_same_weights(end, uninterrupted)


@check("C20", level=1, needs=[Capability.SAVE_BACKGROUND], builds_on=["C18"])
def test_a_background_save_holds_what_was_there_when_it_began(subject: Subject) -> None:
    checkpoint = subject.checkpoint(1)
    ranks = subject.run(saving.save_in_background, subject.setup("qwen3"), checkpoint.role)
    for rank in ranks:
        answers = (rank.complete, rank.while_held, rank.when_released)
        what = "SaveResult.complete, and saved() while the writer is held and once it is released,"
        require_equal(what, answers, (False, False, True))
        require_equal("the list of files that exist while the writer is held", rank.files_while_held, [])
    at_save = whole([rank.at_save for rank in ranks])
    directory = checkpoint.complete()
    saved = {key.value: saved_tensors(CheckpointSource(directory, key)) for key in SAVED}
    require_same_state("the state in the files, and the one when the save began,", saved, at_save)
    after = different(whole([rank.after_step for rank in ranks]), at_save)
    number = sum(len(at_save[key]) for key in SAVED)
    require_equal("the number of tensors that the step during the save has changed", len(after), number)


@check("C20", level=1, needs=[Capability.SAVE_BACKGROUND], builds_on=["C18"])
def test_a_failed_background_save_is_reported_once(subject: Subject) -> None:
    blocked = subject.directory / "blocked"
    blocked.write_text("a file where a directory is needed")
    ranks = subject.run(saving.fail_to_save_in_background, subject.setup("qwen3"), str(blocked))
    for failure, next_save in ranks:
        require(
            failure.startswith("SaveFailed: the background save failed: cannot write") and str(blocked) in failure,
            f"waiting for a background save that cannot write {blocked} raised {failure!r}, expected SaveFailed: the "
            "background save failed: cannot write ...",
        )
        require_equal("the error of the save after the failed one", next_save, "")


@check("C19", level=1, builds_on=["C18"], ranks=[1])
def test_a_killed_save_leaves_the_previous_checkpoint(subject: Subject) -> None:
    assert_the_one_before_is_left(subject, background=False)


@check("C19", level=1, needs=[Capability.SAVE_BACKGROUND], builds_on=["C18", "C20"])
def test_a_killed_background_save_leaves_the_previous_checkpoint(
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
    sizes = {path.name: path.stat().st_size for path in Path(cut.role).iterdir()}
    require(any(sizes.values()), f"the files of the killed save are {sizes}, expected one with bytes in it")
    try:
        taken = cut.complete()
    except SaveFailed:
        taken = ""
    require(
        not taken,
        f"the files of a save that was killed midway, {', '.join(sorted(sizes))}, count as a whole checkpoint; write "
        "the index last",
    )
    for refused in subject.run(states.start_refused, setup, cut.role):
        require(
            refused.startswith("CheckpointDamaged: "),
            f"resuming from the killed save gave {refused or 'no error'!r}, expected CheckpointDamaged",
        )
    checkpoint = Path(before.complete())
    require_equal("the latest checkpoint after a killed save", latest(subject.directory), checkpoint.parent)
    resumed, undisturbed = subject.train(setup, range(1, 3), resume=str(checkpoint)), subject.undisturbed(setup, 3)
    require_same_state("what is read of the save before, and what was saved,", resumed.at_start, at_save)
    assert_resumes(resumed, undisturbed, saved=1)
