"""Slow paths that backends have in common are told where they are taken, with a price each."""

from __future__ import annotations

import pytest

from corerl.config.schema import ClusterInfo
from corerl.kinds import InPieces, ModelSize
from corerl.plugin.slow import IN_PIECES, slow_attention


@pytest.mark.parametrize("why", list(InPieces))
def test_only_packed_attention_is_told_and_every_reason_has_a_price(why: InPieces) -> None:
    size = ModelSize(layers=(1,), experts=(0,), embedding=1, head=1, rest=1, hidden=1, in_pieces=why)
    found = list(slow_attention(ClusterInfo(device="cuda", ranks=1), size))
    assert [each.price for each in found] == ([] if why is InPieces.OWN else [IN_PIECES[why]])
