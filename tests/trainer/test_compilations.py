"""Graphs that `torch.compile` makes, without what inductor would make of them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from corerl.trainer.compilations import Compilations


def twice(x: Tensor) -> Tensor:
    return (2 * x).sum()


def test_a_graph_is_told_of_once_with_what_the_earlier_ones_did_not_allow() -> None:
    torch._dynamo.reset()
    torch.compile(twice, backend="aot_eager")(torch.ones(3))  # before anybody asks
    told = Compilations()
    torch._dynamo.reset()
    compiled = torch.compile(twice, backend="aot_eager")
    compiled(torch.ones(3, requires_grad=True)).backward()
    (first,) = told.take()
    assert (first.what, first.why, first.seconds > 0) == ("twice in test_compilations.py", "", True)
    compiled(torch.ones(3, requires_grad=True)).backward()
    assert told.take() == ()
    compiled(torch.ones(3, 2, requires_grad=True)).backward()
    (second,) = told.take()
    assert second.why.endswith("tensor 'x' rank mismatch. expected 1, actual 2")
    torch._dynamo.reset()


def test_what_a_first_step_compiles_is_not_anew() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(twice, backend="aot_eager")
    told = Compilations()
    with torch.no_grad():
        compiled(torch.ones(3))
    compiled(torch.ones(3, requires_grad=True)).backward()
    assert [each.why for each in told.take()] == ["", ""]
    compiled(torch.ones(3, 2, requires_grad=True)).backward()
    assert [each.why == "" for each in told.take()] == [False]
    torch._dynamo.reset()


def test_where_nothing_was_ever_compiled_nothing_is_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert Compilations().take() == ()
    assert "torch._dynamo.utils" not in sys.modules
