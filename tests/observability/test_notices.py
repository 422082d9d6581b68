"""A run's notices are kept once each, whatever runs in its directory before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from corerl.observability.notices import NoticeFile, read_notices
from corerl.plugin.events import Notice
from tests.observability.run import started

EARLY, LATE = Notice(text="no answer", step=0), Notice(text="step 3 is skipped", step=3)


def told(run_dir: Path, *notices: Notice, first_step: int = 0, mode: str = "train") -> list[Notice]:
    """What the directory holds after a run that tells of `notices`."""
    file = NoticeFile(str(run_dir))
    file.observe(evolve(started(str(run_dir), first_step=first_step), mode=mode))
    for notice in notices:
        file.observe(notice)
    file.shutdown("finished")
    return list(read_notices(run_dir))


def test_a_resumed_run_appends_what_is_new(tmp_path: Path) -> None:
    assert told(tmp_path, EARLY, LATE) == [EARLY, LATE]
    with (tmp_path / "notices.jsonl").open("a") as file:
        file.write('{"step": 4, "te')  # it was killed
    again = evolve(EARLY, step=2)
    assert told(tmp_path, again, Notice(text="new", step=2), first_step=2) == [EARLY, LATE, Notice(text="new", step=2)]
    assert told(tmp_path, mode="eval") == [EARLY, LATE, Notice(text="new", step=2)]


def test_a_new_run_keeps_the_earlier_file(tmp_path: Path) -> None:
    told(tmp_path, EARLY)
    assert told(tmp_path, LATE) == [LATE]
    assert json.loads((tmp_path / "notices-1.jsonl").read_text()) == {"text": "no answer", "step": 0}


@pytest.mark.parametrize("text", ["two\nlines", 'quote " and \u2028', "x" * 5000])
def test_any_text_is_read_as_it_was(tmp_path: Path, text: str) -> None:
    assert told(tmp_path, Notice(text=text)) == [Notice(text=text)]
