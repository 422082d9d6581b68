"""What tells whether an engine of the benchmark holds what it was given: on either side, from sums of bits."""

from __future__ import annotations

import torch

from benchmarks.sglang_sides import Totals, differences, filled, signed
from corerl.weights.manifest import build_manifest

MANIFEST = build_manifest([("q", (6, 4)), ("k", (2, 4)), ("norm", (4,))], dtype="bfloat16", bucket_bytes=64)


def held() -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in filled(MANIFEST, torch.device("cpu")) for name, tensor in tensors.items()}


def test_totals_are_the_same_for_tensors_that_are_fused_and_cut_over_ranks() -> None:
    sent = held()
    whole = Totals.of(sent)
    ranks = [
        Totals.of({"qk": torch.cat([sent["q"].chunk(2)[rank], sent["k"].chunk(2)[rank]]), "norm": sent["norm"]})
        for rank in range(2)
    ]
    assert signed(sum(rank.cut for rank in ranks)) == whole.cut
    assert [rank.whole for rank in ranks] == [whole.whole] * 2
    rest = Totals.of({"k": sent["k"], "norm": sent["norm"]})
    assert Totals.of({"q": sent["q"]}).plus(rest) == whole


def test_totals_tell_of_one_changed_value_and_where_it_lies() -> None:
    sent, other = held(), held()
    other["norm"][1] = -1.0  # the sign bit alone
    assert Totals.of(other).cut == Totals.of(sent).cut
    assert Totals.of(other).whole == Totals.of(sent).whole - 2**15


def test_an_engine_that_does_not_tell_of_a_tensor_differs_from_what_was_sent() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert "1 of 2 tensors" in differences({"a": 1, "b": 2}, {"a": 1})
    assert "1 of 2 tensors" in differences({"a": 1, "b": 2}, {"a": 1, "b": 3})
    assert "2 of 2 tensors" in differences({"a": 1, "b": 2}, None)
