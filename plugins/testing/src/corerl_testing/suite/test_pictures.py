"""Rows that show pictures: compared with the plain backend, which passes each through transformers' own class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import pytest
from attrs import evolve

from corerl.backend import StateKey
from corerl.messages import install_hint
from corerl.plugin import Capability, Kind
from corerl.plugin.registry import scan
from corerl_testing.compare import Trajectory, assert_follows, assert_resumes, assert_same_metrics, same_bits, together
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import pictures, training
from corerl_testing.subject import PACKINGS, PLAIN, Subject

Tower: TypeAlias = Literal["frozen", "trained"]
STEPS = range(3)


def picture_setup(subject: Subject, tower: Tower, packing: str = "packed") -> Setup:
    """Of a model that reads pictures; skips the check where nothing reads them."""
    if not any(found.name == "vision" for found in scan(Kind.PICTURES)):
        pytest.skip(f"nothing reads pictures; run python -m {install_hint('vision')}")
    return evolve(
        subject.setup("qwen3", PACKINGS[packing]), model="", fields=pictures.FIELDS, pictures="vision", tower=tower
    )


BEFORE = ["C41", "C43", "C67", "C70"]  # text alone: steps, also of several calls, and what sleeps between them
TRAINED = {"tower": "trained", "packing": "packed"}


@check("C77", level=1, needs=[Capability.PICTURES], builds_on=BEFORE, variants=TRAINED)
@pytest.mark.parametrize(("tower", "packing"), [("trained", "packed"), ("trained", "one by one"), ("frozen", "packed")])
def test_rows_with_pictures_train_like_the_plain_backend(subject: Subject, tower: Tower, packing: str) -> None:
    setup = picture_setup(subject, tower, packing)
    found = together(subject.run(pictures.train_on_pictures, setup, STEPS))
    wanted = of_plain(subject, tower, STEPS)
    assert_follows(found, wanted)
    assert_same_metrics(found, wanted)


def of_plain(subject: Subject, tower: Tower, numbers: Sequence[int], *arguments: Any) -> Trajectory:
    setup = evolve(picture_setup(subject, tower), backend=PLAIN, options={}, device="cpu", lifted=False)
    return together(subject.runs.rank_sets[1].run(pictures.train_on_pictures, setup, numbers, *arguments))


@check("C77", level=1, needs=[Capability.PICTURES], builds_on=BEFORE)
@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_ranks_without_pictures_keep_in_step_with_those_that_show_some(subject: Subject, tower: Tower) -> None:
    setup = picture_setup(subject, tower)
    shown = ((0,), (), (), ())
    found = together(subject.run(pictures.train_on_pictures, setup, STEPS, shown))
    assert_follows(found, of_plain(subject, tower, STEPS, shown))


@check("C77", level=1, needs=[Capability.PICTURES, Capability.CRITIC], builds_on=BEFORE)
def test_a_critic_is_shown_pictures_too(subject: Subject) -> None:
    setup = evolve(picture_setup(subject, "trained"), value_head=True)
    found = together(subject.run(pictures.train_on_pictures, setup, STEPS))
    plain = evolve(setup, backend=PLAIN, options={}, device="cpu", lifted=False)
    assert_follows(found, together(subject.runs.rank_sets[1].run(pictures.train_on_pictures, plain, STEPS)))


@check("C77", level=1, needs=[Capability.PICTURES], builds_on=BEFORE)
def test_a_step_without_pictures_leaves_a_tower_as_it_is(subject: Subject) -> None:
    setup = picture_setup(subject, "trained")
    require_trained_tower(subject)
    found = together(subject.run(pictures.train_on_pictures, setup, STEPS, ((), (), (), ())))
    moved = moved_in_tower(found)
    require(not moved, f"steps on text alone have changed the tower: {', '.join(moved)}")


def require_trained_tower(subject: Subject) -> None:
    """That a step on pictures changes the tower: a backend that ignores pictures would pass checks of what stays the
    same, and with this fails, as is wanted of one that does not declare them."""
    shown = together(subject.run(pictures.train_on_pictures, picture_setup(subject, "trained"), range(1)))
    require(moved_in_tower(shown), "a step on pictures has not changed the tower that it trains")


def moved_in_tower(trained: Trajectory) -> list[str]:
    """The names of the tower's parameters that training has changed."""
    before, after = trained.at_start[StateKey.PARAM], trained.state[StateKey.PARAM]
    return sorted(name for name in before if "visual" in name and not same_bits(before[name], after[name]))


@check("C79", level=1, needs=[Capability.PICTURES, Capability.ADAM], builds_on=["C77"])
def test_a_tower_takes_a_steps_own_settings_too(subject: Subject) -> None:
    setup = picture_setup(subject, "trained")
    plain = evolve(setup, backend=PLAIN, options={}, device="cpu", lifted=False)
    asked = (training.SETTINGS, pictures.samples_with_pictures)
    found = together(subject.run(training.train_with, setup, *asked))
    assert_follows(found, together(subject.runs.rank_sets[1].run(training.train_with, plain, *asked)))


@check("C78", level=1, needs=[Capability.PICTURES], builds_on=["C18", "C77"])
@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_checkpoints_hold_a_tower_only_if_it_is_trained(subject: Subject, tower: Tower) -> None:
    require_trained_tower(subject)
    setup, checkpoint = picture_setup(subject, tower), subject.checkpoint(2)
    saving = (pictures.SHOWN, "", 1, checkpoint.role)
    uninterrupted = together(subject.run(pictures.train_on_pictures, setup, range(4), *saving))
    saved = checkpoint.complete()
    resumed = together(subject.run(pictures.train_on_pictures, setup, range(2, 4), pictures.SHOWN, saved))
    assert_resumes(resumed, uninterrupted, saved=2)
    tensors = uninterrupted.state
    others = tensors[StateKey.PARAM].keys() - tensors[StateKey.MASTER].keys()
    of_tower = {name for name in tensors[StateKey.PARAM] if "visual" in name}
    require_equal("the parameters without a master", others, of_tower if tower == "frozen" else set())
    if tower == "frozen":
        changed = moved_in_tower(uninterrupted)
        require(not changed, f"training has changed a frozen tower: {', '.join(changed)}")
