"""Rows that show pictures: compared with the plain backend, which passes each through transformers' own class."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pytest
from attrs import evolve

from corerl.plugin import Capability, Kind
from corerl.plugin.registry import scan
from corerl_testing.compare import assert_follows, assert_same_metrics, together
from corerl_testing.harness import Setup
from corerl_testing.marks import check
from corerl_testing.scenarios import pictures
from corerl_testing.subject import PACKINGS, PLAIN, Subject

Tower: TypeAlias = Literal["frozen", "trained"]
STEPS = 3


def picture_setup(subject: Subject, tower: Tower, packing: str = "packed") -> Setup:
    """Of a model that reads pictures; skips the check where nothing reads them."""
    if not any(found.name == "vision" for found in scan(Kind.PICTURES)):
        pytest.skip("nothing reads pictures; run python -m pip install 'corerl[vision]'")
    return evolve(
        subject.setup("qwen3", PACKINGS[packing]), model="", fields=pictures.FIELDS, pictures="vision", tower=tower
    )


TRAINED = {"tower": "trained", "packing": "packed"}


@check("C77", level=1, needs=[Capability.PICTURES], builds_on=["C41"], variants=TRAINED)
@pytest.mark.parametrize(("tower", "packing"), [("frozen", "packed"), ("trained", "packed"), ("trained", "one by one")])
def test_rows_with_pictures_train_like_the_plain_backend(subject: Subject, tower: Tower, packing: str) -> None:
    setup = picture_setup(subject, tower, packing)
    found = together(subject.run(pictures.train_on_pictures, setup, STEPS))
    plain = evolve(picture_setup(subject, tower), backend=PLAIN, options={}, device="cpu")
    wanted = together(subject.runs.rank_sets[1].run(pictures.train_on_pictures, plain, STEPS))
    assert_follows(found, wanted)
    assert_same_metrics(found, wanted)
