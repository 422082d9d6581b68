"""Findings about libraries, and the price of slow paths."""

from __future__ import annotations

from importlib import metadata

import pytest

from corerl.config.schema import ClusterInfo
from corerl.kinds import InPieces, ModelSize
from corerl.plugin.spec import IN_PIECES, Finding, Level, check_library, slow_attention


def found(distribution: str = "numpy") -> Finding:
    return check_library("Wood", distribution, oldest=(0, 19, 8), end=(0, 20), why="it splinters", fix="plant a tree")


def test_a_library_that_is_not_installed_is_an_error() -> None:
    assert found("corerl-is-not-made-of-this") == Finding(
        level=Level.ERROR, what="Wood is not installed", why="this backend is built on it", fix="plant a tree"
    )


@pytest.mark.parametrize("installed", ["0.19.8", "0.19.8+cu130", "0.19.12", "0.19.9.post1"])
def test_a_version_in_between_is_one_to_run_with(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    assert found() == Finding(level=Level.OK, what=f"Wood {installed} is supported by this backend")


@pytest.mark.parametrize("installed", ["0.19.7", "0.19", "0.20", "0.20.0rc1", "1.0"])
def test_an_unsupported_version_is_an_error_with_its_reason(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    assert found() == Finding(
        level=Level.ERROR,
        what=f"Wood {installed} is not supported by this backend",
        why="it splinters",
        fix="plant a tree",
    )


@pytest.mark.parametrize("why", list(InPieces))
def test_every_reason_for_slow_packed_attention_has_a_price(why: InPieces) -> None:
    size = ModelSize(layers=(1,), experts=(0,), embedding=1, head=1, rest=1, hidden=1, in_pieces=why)
    found = list(slow_attention(ClusterInfo(device="cuda", ranks=1), size))
    assert [each.price for each in found] == ([] if why is InPieces.OWN else [IN_PIECES[why]])
