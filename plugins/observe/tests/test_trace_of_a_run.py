"""trace.json of a real run: every process is in it, and what it did lies where the driver says that it was asked."""

from __future__ import annotations

import pytest

from plugins.observe.tests.traces import Events, Slice, arrows, check, read, slices
from tests.end_to_end.command import Command, write_small

pytestmark = pytest.mark.processes

STEPS = 3
MINI_BATCHES = 2
TRACED = [
    "backend.name=plain", "roles.actor.ranks=1", "rollout.replicas=2", f"run.steps={STEPS}", "eval.every=0",
    "checkpoint.every=0", "checkpoint.export=false", "train.tokens_per_micro_batch=128",
    'extensions=[{name="jsonl"},{name="trace"}]',
]  # fmt: skip


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Events:
    directory = tmp_path_factory.mktemp("traced")
    with Command("train", write_small(directory), f"run.dir={directory}/run", *TRACED, logs=directory) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
        assert command.err == ""
    return read(directory / "run" / "trace.json")


def of(events: Events, process: str, track: str, name: str) -> list[Slice]:
    return [each for each in slices(events) if each[:3] == (process, track, name)]


def holder(inner: Slice, among: list[Slice]) -> Slice:
    (found,) = [each for each in among if each.begin <= inner.begin and inner.end <= each.end]
    return found


def test_every_process_is_drawn_and_every_arrow_has_both_ends(events: Events) -> None:
    check(events)
    assert {each.process for each in slices(events)} == {"driver", "idle", "actor rank 0", "engine-0", "engine-1"}
    assert len(arrows(events)) == sum(event.get("cat") == "call" for event in events)


def test_each_optimizer_step_lies_in_a_train_phase_of_the_driver(events: Events) -> None:
    phases = of(events, "driver", "phases", "train")
    steps = of(events, "actor rank 0", "calls", "train")
    assert (len(phases), len(steps)) == (STEPS, STEPS * MINI_BATCHES)
    assert [phases.index(holder(step, phases)) for step in sorted(steps, key=lambda each: each.begin)] == [
        step for step in range(STEPS) for _ in range(MINI_BATCHES)
    ]
    asked = {call.name: step for call, step in arrows(events) if step.name == "train"}
    assert sorted(asked) == [f"train at optimizer step {step}" for step in range(STEPS * MINI_BATCHES)]


def test_weights_are_sent_and_received_in_the_same_phase(events: Events) -> None:
    phases = of(events, "driver", "phases", "update_weights")
    sent = of(events, "actor rank 0", "calls", "update_weights")
    assert len(phases) == len(sent) == 1 + STEPS
    for engine in ("engine-0", "engine-1"):
        received = of(events, engine, "calls", "receive")
        assert [phases.index(holder(each, phases)) for each in received] == list(range(1 + STEPS))
        assert [phases.index(holder(each, phases)) for each in sent] == list(range(1 + STEPS))
    for part in ("meet engines", "gather", "send", "wait for engines"):
        assert {holder(each, sent) for each in of(events, "actor rank 0", "calls", part)} == set(sent)


def test_nobody_is_idle_while_it_works_and_ranks_wait_for_the_samples_that_engines_draw(events: Events) -> None:
    works = {
        "ranks": of(events, "actor rank 0", "calls", "train"),
        **{engine: of(events, engine, "calls", "generate") for engine in ("engine-0", "engine-1")},
    }
    idle = [each for each in slices(events) if each.process == "idle"]
    assert {each.track for each in idle} == set(works)
    for track, work in works.items():
        for wait in (each for each in idle if each.track == track):
            # Times of two clocks.
            assert not any(wait.begin + 1000 < each.end and each.begin < wait.end - 1000 for each in work), wait
    for drawn in works["engine-0"][1:]:  # behind what is compared before the first step
        middle = (drawn.begin + drawn.end) // 2
        assert [each.name for each in idle if each.track == "ranks" and each.begin <= middle < each.end] == ["samples"]
