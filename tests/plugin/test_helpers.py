"""Findings about libraries, and the price of slow paths."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from corerl.config.schema import ClusterInfo
from corerl.kinds import InPieces, ModelSize
from corerl.plugin.spec import IN_PIECES, Finding, Level, check_library, slow_attention

IN_BETWEEN, OUTSIDE = (
    ["0.19.8", "0.19.8+cu130", "0.19.12", "0.19.9.post1"],
    ["0.19.7", "0.19", "0.20", "0.20.0rc1", "1.0"],
)
FINE = {"level": Level.OK}
WRONG = {"level": Level.ERROR, "fix": "plant a tree"}


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        ("", {**WRONG, "what": "Wood is not installed", "why": "this backend is built on it"}),
        *((each, {**FINE, "what": f"Wood {each} is supported by this backend"}) for each in IN_BETWEEN),
        *(
            (each, {**WRONG, "what": f"Wood {each} is not supported by this backend", "why": "it splinters"})
            for each in OUTSIDE
        ),
    ],
)
def test_a_library_of_another_version_is_an_error(
    installed: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        monkeypatch.setattr(metadata, "version", lambda name: installed)
    given = {"oldest": (0, 19, 8), "end": (0, 20), "why": "it splinters", "fix": "plant a tree"}
    assert check_library("Wood", "corerl-is-not-made-of-this", **given) == Finding(**wanted)


@pytest.mark.parametrize("why", list(InPieces))
def test_every_reason_for_slow_packed_attention_has_a_price(why: InPieces) -> None:
    size = ModelSize(layers=(1,), experts=(0,), embedding=1, head=1, rest=1, hidden=1, in_pieces=why)
    found = list(slow_attention(ClusterInfo(device="cuda", ranks=1), size))
    assert [each.price for each in found] == ([] if why is InPieces.OWN else [IN_PIECES[why]])
