from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen

from corerl.errors import HookFailed
from corerl.plugin.hooktrace import VARIABLE, summary
from corerl.plugin.host import PluginHost
from corerl.types import Output
from tests.plugin.test_host import BATCH, CONFIG, CONTEXT, Fake, Logs, train


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


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Without the time of day, and with the time taken as N."""
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("corerl: note: ")]
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} ", line) for line in err)
    return [re.sub(r" \d+\.\d ms ", " N ms ", line[13:]) for line in err]


def test_each_call_is_printed_with_its_plugins_outermost_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    extensions = [(name, Logs(name, [])) for name in ("a", "b")]
    host = PluginHost(Fake(), name="mine", extensions=extensions, context=CONTEXT)
    host.init(CONFIG, CONTEXT)
    lines(capsys)
    train(host)
    host.shutdown("finished")
    halves = [
        (
            "actor rank 1 > forward_backward [backend:mine] "
            "batch=PackedBatch(micro_batches=(), count=1, temperature=1.0, step_tokens=0, pictures={}) "
            "loss=LossSpec(name='clipped', params={}, outputs=(logprobs,)) outputs=() last=True"
        ),
        "actor rank 1 < forward_backward N ms GradientResult(metrics={}, tokens=8, outputs=None)",
        (
            "actor rank 1 > optimizer_step [extension:a > extension:b > backend:mine] "
            "step=Step(optimizer_step=12, rollout_step=3, lr=0.1, adam=None) scale=1.0"
        ),
        "actor rank 1 < optimizer_step N ms StepResult(applied=True, grad_norm=1.5, metrics={})",
    ]
    ends = []
    for plugin in ("extension:a", "extension:b", "backend:mine"):
        ends += [f"actor rank 1 > shutdown [{plugin}] reason='finished'", "actor rank 1 < shutdown N ms None"]
    assert lines(capsys) == [*halves, *ends]


def test_errors_are_printed_and_nested_calls_are_indented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "1")

    class Forwards:
        def forward_backward(self) -> Iterator[None]:
            host.forward(BATCH, (), "")
            return (yield)

    host = PluginHost(
        Fake(forward_backward=ValueError("boom\nmore")), name="mine", extensions=[("f", Forwards())], context=CONTEXT
    )
    host.init(CONFIG, CONTEXT)
    lines(capsys)
    with pytest.raises(HookFailed):
        train(host)
    told = [line.partition("rank 1 ")[2] for line in lines(capsys)]
    assert [line[:11] for line in told] == ["> forward_b", "  > forward", "  < forward", "< forward_b"]
    assert told[-1] == "< forward_backward N ms raised ValueError: boom"


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_printed_where_nobody_asks(
    value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    host = PluginHost(Fake(), name="mine", context=CONTEXT)
    host.init(CONFIG, CONTEXT)
    host.shutdown("finished")
    assert capsys.readouterr().err == ""
