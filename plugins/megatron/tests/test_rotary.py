"""Queries and keys turned in one call: what megatron-core makes of them, one sequence after the other."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from corerl.ops import PackedSequences
from corerl_megatron.packed import Split, packed_params
from corerl_megatron.rotary import BY_SEQUENCE, turned
from corerl_testing import Runs
from plugins.megatron.tests import ranks
from plugins.megatron.tests.test_families import drawn

LENGTHS = (12, 4, 20, 8)  # multiples of 2 x 2, as two context-parallel ranks want them
NAMES = ("mla_rotary_interleaved", "multi_latent_attention")
LATENT = next(name for name in NAMES if name in inspect.signature(BY_SEQUENCE).parameters)


def packed(lengths: tuple[int, ...] = LENGTHS, *, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Any]:
    """The bounds of sequences as layers get them, and the group of the ranks that share these."""
    packing = PackedSequences.of(np.array([0, *np.cumsum(lengths)]), "cpu")
    positions = torch.cat([torch.arange(length) for length in lengths])
    split = None
    if ranks > 1:
        split = Split.of(packing.bounds, rank=rank, ranks=ranks, device=torch.device("cpu"))
        positions = positions[split.local]
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    return packed_params(packing, split, positions).cu_seqlens_q, group


def drawn_with_gradient(dtype: torch.dtype = torch.float32, *, tokens: int = sum(LENGTHS), seed: int = 0) -> Tensor:
    """[tokens, 3 heads, 16]"""
    return torch.randn(tokens, 3, 16, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def angles(positions: int, width: int, *, interleaved: bool = False) -> Tensor:
    """[positions, 1, 1, width], as megatron-core makes them."""
    found = torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, width, 2) / width))
    both = found.repeat_interleave(2, dim=1) if interleaved else torch.cat([found, found], dim=1)
    return both[:, None, None]


@pytest.mark.parametrize("width", [16, 10])  # whole heads, and the first part of each
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize("place", [{}, {"rank": 0, "ranks": 2}, {"rank": 1, "ranks": 2}])
def test_one_call_turns_as_megatron_core_does_sequence_by_sequence(
    width: int, interleaved: bool, latent: bool, scale: float, place: dict[str, int]
) -> None:
    bounds, group = packed(**place)
    freqs = angles(max(LENGTHS), width, interleaved=interleaved)
    how = {"rotary_interleaved": interleaved, LATENT: latent, "mscale": scale, "cp_group": group}
    outs, grads = [], []
    for turn in (turned, BY_SEQUENCE):
        t = drawn_with_gradient(tokens=sum(LENGTHS) // place.get("ranks", 1))
        outs.append(turn(t, bounds, freqs, **how))
        (outs[-1] * drawn_with_gradient(tokens=len(t), seed=1).detach()).sum().backward()
        grads.append(t.grad)
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


def test_in_bfloat16_one_call_rounds_as_megatron_core_does() -> None:
    bounds, group = packed()
    t, freqs = drawn_with_gradient(torch.bfloat16).detach(), angles(max(LENGTHS), 16)
    found, wanted = (turn(t, bounds, freqs, cp_group=group) for turn in (turned, BY_SEQUENCE))
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=2**-9)  # a cosine that the host's loops round apart
    assert (found == wanted).float().mean() > 0.99


def test_layers_that_turn_alike_share_tables() -> None:
    bounds, _ = packed()
    freqs = angles(max(LENGTHS), 16)
    tables = bounds.turns.tables  # type: ignore[attr-defined]
    first = tables(freqs, dtype=torch.float32, scale=1.0, neighbors=False)
    for again in (freqs, freqs.detach()):
        found = tables(again, dtype=torch.float32, scale=1.0, neighbors=False)
        assert all(a is b for a, b in zip(found, first, strict=True))
    others = [
        tables(freqs.clone(), dtype=torch.float32, scale=1.0, neighbors=False),
        tables(freqs, dtype=torch.bfloat16, scale=1.0, neighbors=False),
        tables(freqs, dtype=torch.float32, scale=2.0, neighbors=False),
        tables(freqs, dtype=torch.float32, scale=1.0, neighbors=True),
    ]
    assert all(each[0] is not first[0] for each in others)


@pytest.mark.parametrize("place", [{}, {"rank": 1, "ranks": 2}])
def test_angles_of_all_tokens_are_taken_as_they_are(place: dict[str, int]) -> None:
    bounds, group = packed(**place)
    freqs = angles(sum(LENGTHS), 16)
    t = drawn_with_gradient(tokens=sum(LENGTHS) // place.get("ranks", 1)).detach()
    found = turned(t, bounds, freqs, cp_group=group)
    torch.testing.assert_close(found, BY_SEQUENCE(t, bounds, freqs, cp_group=group), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, turned(t, bounds, angles(max(LENGTHS), 16), cp_group=group))


def test_bounds_that_another_has_made_are_left_to_megatron_core() -> None:
    bounds, group = packed()
    t, freqs = drawn_with_gradient().detach(), angles(max(LENGTHS), 16)
    found = turned(t, bounds.clone(), freqs, cp_group=group, **{LATENT: True})
    assert torch.equal(found, BY_SEQUENCE(t, bounds, freqs, cp_group=group, **{LATENT: True}))


def operations(turn: Any, lengths: tuple[int, ...]) -> int:
    bounds, group = packed(lengths)
    t, freqs = drawn_with_gradient(tokens=sum(lengths)), angles(max(lengths), 16)
    return ranks.operations_of(lambda: turn(t, bounds, freqs, cp_group=group).sum().backward())


def test_megatron_core_still_turns_one_sequence_after_the_other() -> None:
    """If this fails, `turn_all_at_once` is not needed with this version any more."""
    assert operations(BY_SEQUENCE, (4,) * 40) > operations(BY_SEQUENCE, (4,) * 4) + 36
    assert operations(turned, (4,) * 40) == operations(turned, (4,) * 4)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "youtu"])  # two ropes; latent attention
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_many_short_samples_take_as_many_operations_as_few(
    runs: Runs, tmp_path: Path, model_type: str, recompute: str
) -> None:
    family = Runs(runs.rank_sets, {model_type: drawn(model_type, tmp_path)})
    setup = family.setup("megatron", model_type).packed_by(256)
    setup = evolve(setup, train=evolve(setup.train, recompute=recompute))
    (counts,) = family.rank_sets[1].run(ranks.operations, setup, [(40,) * 6, (10,) * 24])
    assert counts[0] == counts[1]
