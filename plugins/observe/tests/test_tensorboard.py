from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from corerl.plugin import Event, RunRewound, SampleShown
from corerl_observe.specs import TensorboardOptions
from corerl_observe.tensorboard import Tensorboard, markdown
from tests.observability.run import evaluated, metrics, started, steps, whole


def write(run_dir: Path, events: list[Event]) -> None:
    extension = Tensorboard(options=TensorboardOptions(samples_every=2), run_dir=str(run_dir))
    for event in events:
        extension.observe(event)
    extension.shutdown("finished")


def read(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard")).Reload()


def test_numbers_and_answers_are_read_back(tmp_path: Path) -> None:
    write(tmp_path, list(whole(str(tmp_path))))
    events = read(tmp_path)
    rewards = events.Scalars("rollout/reward")
    assert [point.step for point in rewards] == [0, 1, 2, 3]
    assert [point.value for point in rewards] == pytest.approx([metrics(s)["rollout/reward"] for s in range(4)])
    assert [(p.step, p.value) for p in events.Scalars("eval/exact_match")] == [(0, 0.0), (2, 0.25), (4, 0.5)]
    texts = events.Tensors("samples/rollout/text_summary")
    assert [text.step for text in texts] == [0, 2]
    assert b"| `35018>` | `01358` | `01358` | 1.000 |" in texts[0].tensor_proto.string_val[0]
    assert [text.step for text in events.Tensors("samples/held-out/text_summary")] == [0, 2, 4]


def test_steps_that_are_done_again_are_replaced(tmp_path: Path) -> None:
    write(tmp_path / "rewound", [started("rewound"), *steps(0, 3), RunRewound(step=1), *steps(1, 4)])
    write(tmp_path / "resumed", [started("resumed"), *steps(0, 4)])
    write(tmp_path / "resumed", [started("resumed", first_step=2), *steps(2, 4)])
    for name in ("rewound", "resumed"):
        assert [point.step for point in read(tmp_path / name).Scalars("train/loss")] == [0, 1, 2, 3], name


def test_scores_of_several_weights_stand_side_by_side(tmp_path: Path) -> None:
    for step in (4, 2):
        write(tmp_path, [started(str(tmp_path), first_step=step, mode="eval"), evaluated(step)])
    assert {point.step for point in read(tmp_path).Scalars("eval/exact_match")} == {2, 4}


def test_markup_in_an_answer_does_not_break_the_table() -> None:
    table = markdown([SampleShown(prompt="a|b", response="`x`\n", answer="", reward=0.0)])
    assert table.splitlines()[2] == r"| `a\|b` | `'x'\n` |  | 0.000 |"
