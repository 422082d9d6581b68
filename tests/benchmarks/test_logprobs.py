from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import logprobs
from benchmarks.report import load


def test_all_sides_do_the_same_work_and_the_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "logprobs.json"
    monkeypatch.setattr(sys, "argv", ["logprobs", "--tiny", "--rounds", "2", "--output", str(output)])
    logprobs.main()
    report = load(output)
    assert [(each.what, each.against, len(each.ours)) for each in report.comparisons] == [
        (f"H {width}, {what}", against, 2)
        for width in (8, 16)
        for what in ("log-probs", "log-probs and entropy")
        for against in ("the matrix products", "by torch's operators")
    ]


def test_the_products_are_those_that_log_probs_make() -> None:
    head = logprobs.Head(8, tokens=10, words=40, device=torch.device("cpu"), chunk=4)

    def products(work: object) -> list[tuple[int, ...]]:
        with torch.profiler.profile(record_shapes=True) as profile:
            work()  # type: ignore[operator]
        return sorted(
            tuple(map(tuple, event.input_shapes[:2]))
            for event in profile.events()
            if event.name in ("aten::mm", "aten::addmm")
        )

    made = products(lambda: head.ours(with_entropy=True))
    assert len(made) == 3 * 4 and made == products(head.products)
