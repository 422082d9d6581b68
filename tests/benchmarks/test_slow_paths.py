"""The benchmark of slow paths on a CPU: all sides of a piece take the same steps, and files have what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve

from benchmarks.slow_paths import EIGHT, PIECES, Found, attending, fitted, measure, unlike
from corerl.models import attention
from corerl.ops import PackedSequences, packed_attention
from corerl_testing.pool import OneRank


def measured(directory: str) -> tuple[Found, list[str]]:
    found = Found(directory=Path(directory), facts={"torch": torch.__version__})
    sides = [fitted(side, tiny=True) for side in PIECES["smollm2"]()]
    sides = [evolve(side, case=evolve(side.case, lengths=(6, 12, 9), tokens=20)) for side in sides]
    found.sides["smollm2"] = {side.name: measure(side, rounds=2) for side in sides}
    found.write()
    return found, unlike(sides, found.sides["smollm2"])


@pytest.mark.processes
def test_both_backends_take_the_same_steps_and_the_files_have_all_sides(tmp_path: Path) -> None:
    ((found, differ),) = OneRank().run(measured, str(tmp_path))
    assert differ == []
    sides = json.loads((tmp_path / "slow_paths.json").read_text())["sides"]["smollm2"]
    assert sides == found.sides["smollm2"] and len(sides) == 4
    assert all(
        len(each["seconds"]) == 2 and each["micro_batches"] == 2 and each["tokens"] == 27 for each in sides.values()
    )
    text = (tmp_path / "slow_paths.md").read_text()
    assert all(f"| {side} | " in text for side in sides) and "| **1.00** | " in text


def test_a_gradient_that_is_another_is_told() -> None:
    sides = PIECES["smollm2"]()[:2]
    found = {side.name: {"norms": [1.0 + number]} for number, side in enumerate(sides)}
    (line,) = unlike(sides, found)
    assert line == "THE FIRST GRADIENTS DIFFER: FSDP has 2, the first side 1"


@pytest.mark.parametrize("more", [{"sink": 0.5}, {"softcap": 2.0}])
def test_sinks_and_caps_are_those_of_packed_attention(more: dict[str, float]) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, 2, 8, generator=draw) for _ in range(3))
    packing = PackedSequences.of(torch.tensor([0, 4, 7]), "cpu")
    with attending(**more):
        found = attention.packed_attention(q, k, v, packing)
    options = {"sinks": torch.full((2,), more["sink"])} if "sink" in more else dict(more)
    assert torch.equal(found, packed_attention(q, k, v, packing, **options))  # type: ignore[arg-type]
    assert not torch.allclose(found, packed_attention(q, k, v, packing))


def test_a_tiny_case_has_the_kernels_of_its_large_one() -> None:
    """Heads beyond what the packed kernel takes stay beyond it."""
    wide = PIECES["heads"]()[2].case
    assert (EIGHT.tiny.fields["head_dim"], wide.tiny.fields["head_dim"]) == (16, 320)
