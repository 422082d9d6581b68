"""CORERL_TRACE=1 in a real run of two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.command import Command, write_small

RANKS = 2
HALVES = ["forward_backward", "optimizer_step"]  # of a step


@pytest.mark.nightly
def test_every_ranks_hook_trace_reaches_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORERL_TRACE", "1")
    overrides = ["run.steps=1", "eval.every=0", "checkpoint.every=0", "checkpoint.export=false"]
    words = [write_small(tmp_path), f"run.dir={tmp_path}/run", *overrides]
    with Command("train", *words, logs=tmp_path, own_ray=True) as command:  # a shared one does not forward its logs
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    lines = command.err.splitlines()
    for rank in range(RANKS):
        own = [line.partition(f"actor rank {rank} ")[2] for line in lines if f"actor rank {rank} " in line]
        hooks = [tuple(line.split()[:2]) for line in own]
        train = [(sign, half) for half in HALVES for sign in "><"] * 2
        push = [(sign, "update_weights") for sign in "><"]
        ends = [(sign, "shutdown") for sign in "><"]
        save = [(sign, "save") for sign in "><"]
        compare = [(sign, "forward") for sign in "><"]
        assert hooks == [(">", "init"), ("<", "init"), *push, *compare, *train, *push, *save, *ends]
        (first, *_) = [line for line in own if line.startswith("> forward_backward")]
        assert "[backend:fsdp] batch=PackedBatch(" in first and re.search(r"tokens=int64\[\d+\]", first)
    assert any("driver > observe [extension:jsonl] event=StepFinished(step=0" in line for line in lines)
