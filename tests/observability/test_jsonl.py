from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Literal

import pytest
from attrs import evolve

from corerl.observability.jsonl import Jsonl, JsonlOptions, NoticeFile, read_notices, reopen
from corerl.plugin.events import Event, Notice, RunRewound, StepFinished
from tests.observability.run import STEPS, evaluated, finished, metrics, started, steps, whole


def extension(run_dir: Path, *, samples: Literal["none", "shown", "all"] = "shown") -> Jsonl:
    return Jsonl(options=JsonlOptions(samples=samples), run_dir=str(run_dir))


def test_each_step_and_evaluation_is_one_flat_object(tmp_path: Path) -> None:
    jsonl = extension(tmp_path)
    for event in whole(str(tmp_path)):
        jsonl.observe(event)
    # Not closed: a reader sees every line as soon as it is written.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 1, 2, 2, 3, 4]
    assert lines[1] == {"step": 0, **metrics(0)}
    assert lines[-1] == {"step": 4, "eval/reward": 1.0, "eval/exact_match": 0.5}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 7
    assert samples[1] == {
        "step": 0, "kind": "sampled", "prompt": "35018>", "response": "01358", "answer": "01358", "reward": 1.0,
        "sample": 0, "source": "",
    }  # fmt: skip
    jsonl.shutdown("finished")


def told_of(run_dir: Path, *events: Event) -> None:
    jsonl = extension(run_dir)
    for event in events:
        jsonl.observe(event)
    jsonl.shutdown("ended")


@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["resumed", "rewound"])
def test_steps_that_are_repeated_leave_the_files_of_an_undisturbed_run(tmp_path: Path, how: str, step: int) -> None:
    straight, other = tmp_path / "straight", tmp_path / "other"
    told_of(straight, *whole(str(straight)))
    before, after = [started(str(other)), *steps(0, 3)], [*steps(step, STEPS), evaluated(STEPS), finished(str(other))]
    if how == "rewound":
        told_of(other, *before, RunRewound(step=step), *after)
    else:
        told_of(other, *before)
        with (other / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "rollout/rew')
        told_of(other, started(str(other), first_step=step), *after)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (other / name).read_bytes() == (straight / name).read_bytes()
    kept = ["metrics-1.jsonl", "samples-1.jsonl"] if how == "resumed" and step == 0 else []  # of another run, then
    assert sorted(path.name for path in other.iterdir()) == sorted(["metrics.jsonl", "samples.jsonl", *kept])


def test_a_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"step": step, "response": "a" * 1000}) + "\n" for step in range(2000)))
    size = path.stat().st_size
    tracemalloc.start()
    reopen(path, before=1000).close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert abs(path.stat().st_size - size / 2) < 1000
    assert peak < 0.1 * size


def test_what_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    jsonl = extension(tmp_path, samples="none")
    jsonl.observe(started(str(tmp_path)))
    jsonl.observe(StepFinished(step=0, metrics={"a": math.nan, "b": -math.inf, "c": 2.0}))
    jsonl.shutdown("finished")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": null, "b": null, "c": 2.0}\n'
    assert not (tmp_path / "samples.jsonl").exists()


# ---- notices -----------------------------------------------------------------------------------------------------

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
