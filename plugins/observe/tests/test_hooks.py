from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen

from corerl.errors import HookFailed
from corerl.plugin import NoOptions
from corerl.types import Output
from corerl_observe.hooks import HookTrace, summary
from plugins.observe.tests.hosts import batch, host, step, train


@frozen
class Pair:
    left: Any
    _right: Any = None


def test_arrays_are_shown_by_shape_and_never_read() -> None:
    class Unreadable(torch.Tensor):
        def __repr__(self, **_: Any) -> str:
            raise AssertionError("read")

    tensor = torch.ones(2, 3, dtype=torch.bfloat16).as_subclass(Unreadable)
    assert summary(tensor) == "bfloat16[2, 3]"
    assert summary(torch.empty(4, device="meta")) == "float32[4] on meta"
    assert summary({"a": np.zeros((5, 1), np.int64), "b": 1.5}) == "{'a': int64[5, 1], 'b': 1.5}"
    assert summary(Pair(np.zeros(3, bool), Output.ENTROPY)) == "Pair(left=bool[3], right=entropy)"


def test_long_and_deep_values_are_cut_short() -> None:
    assert len(summary("x" * 100)) < 70
    assert summary(list(range(20))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"
    assert "Pair(...)" in summary(Pair(Pair(Pair(Pair(Pair(1))))))


def lines(run_dir: Path) -> list[str]:
    """Without the time of day, and with the time taken as N."""
    written = (run_dir / "hooks/actor-0.txt").read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line) for line in written)
    return [re.sub(r" \d+\.\d ms ", " N ms ", line[13:]) for line in written]


def test_each_call_of_a_hook_has_two_lines(tmp_path: Path) -> None:
    traced = host(tmp_path, hooks=HookTrace(options=NoOptions(), run_dir=str(tmp_path)))
    train(traced, batch(), step(0))
    traced.shutdown("finished")
    written = lines(tmp_path)
    hooks = ["init", "forward_backward", "optimizer_step"]
    assert [line.split()[:2] for line in written] == [[mark, hook] for hook in hooks for mark in "><"]
    assert "tokens=int64[15]" in written[2] and "loss=LossSpec(name='clipped'" in written[2]
    assert written[3].startswith("< forward_backward N ms GradientResult(metrics={")
    assert written[4] == "> optimizer_step step=Step(optimizer_step=0, rollout_step=0, lr=0.001, adam=None) scale=1.0"


def test_errors_are_written_and_nested_calls_are_indented(tmp_path: Path) -> None:
    class Forwards:
        def forward_backward(self) -> Iterator[None]:
            traced.forward(batch(), (Output.LOGPROBS,), "")
            yield
            raise ValueError("boom\nmore")

    traced = host(tmp_path, hooks=HookTrace(options=NoOptions(), run_dir=str(tmp_path)), forwards=Forwards())
    with pytest.raises(HookFailed):
        train(traced, batch(), step(0))
    traced.shutdown("failed")
    written = lines(tmp_path)[2:]
    assert [line[:11] for line in written] == ["> forward_b", "  > forward", "  < forward", "< forward_b"]
    assert written[-1] == "< forward_backward N ms raised ValueError: boom"
