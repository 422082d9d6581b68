"""The benchmark of what is left asleep, on CPU ranks: every case says what each of its ranks holds, in a process of its
own; and a case that fails leaves those that did not."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import residual
from benchmarks.report import load
from benchmarks.steps import GIB


def test_each_case_says_what_each_of_its_ranks_holds(tmp_path: Path, forked_python: None) -> None:
    output = tmp_path / "residual.json"
    words = ["residual", "deepspeed-stage3", "megatron", "--ranks", "2", "--tiny", "--output", str(output)]
    with mock.patch.object(sys, "argv", words):
        assert residual.main() == 0
    numbers = {number.what: number.values for number in load(output).numbers}
    assert all(len(values) == 2 for values in numbers.values())
    for name in ("deepspeed-stage3", "megatron"):
        # Weights, moments and masters of this model are 12 bytes for each of its parameters, 1.9 MB.
        assert max(numbers[f"{name}: {residual.COUNTED}"]) * GIB < 10_000
    assert len(numbers) == 12


def test_a_case_that_is_not_done_in_time_is_named_and_others_keep_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = residual.Left(context=0, all=0, torchs=0, tensors=0, counted=3 * GIB)

    def ranks_of(case: residual.Case) -> list[list[residual.Left]]:
        if case.backend == "fsdp":
            raise RuntimeError("it was not done after 300 s")
        return [[left, left]] * case.ranks

    output = tmp_path / "residual.json"
    words = ["residual", "fsdp", "megatron", "--tiny", "--output", str(output)]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(residual, "ranks_of", ranks_of),
        pytest.raises(SystemExit, match=r"^fsdp: it was not done after 300 s$"),
    ):
        residual.main()
    assert {number.what: number.values for number in load(output).numbers}[f"megatron: {residual.COUNTED}"] == [3.0]
    assert "megatron: the context" in capsys.readouterr().out
