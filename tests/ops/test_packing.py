from __future__ import annotations

import numpy as np
import pytest
import torch

from corerl.ops.packing import PackedSequences, upload


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_host_does_not_wait_for_what_the_device_has_to_do_before() -> None:
    upload(np.zeros(2**20, np.float32), "cuda")  # pinned memory is there now
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles, of which a GPU has no 2e9 a second: about a second
    done = torch.cuda.Event()
    done.record()
    there = upload(np.ones(2**20, np.float32), "cuda")
    assert not done.query()
    assert float(there.sum()) == 2**20


def test_shared_tokens_have_the_place_of_the_first() -> None:
    packing = PackedSequences.of(np.array([0, 5, 9, 12, 14]), "cpu").sharing(np.array([0, 2, 3, 0]))
    # Sequences abcde, abfg, abf and hi become abcde fg - hi.
    prefixes = packing.prefixes
    assert prefixes is not None
    assert (packing.tokens, packing.longest, packing.bounds.tolist()) == (9, 5, [0, 5, 7, 7, 9])
    assert prefixes.place.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 1, 5, 7, 8]
    assert prefixes.token.tolist() == [0, 1, 2, 3, 4, 7, 8, 12, 13]
    assert packing.continuations.tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert packing.previous.tolist() == [0, 1, 2, 3, 1, 5, 7]
    copies = np.split(prefixes.copies.numpy(), prefixes.first_copy.numpy()[1:])
    assert [each.tolist() for each in copies] == [[0, 5, 9], [1, 6, 10], [2], [3], [4], [7, 11], [8], [12], [13]]


@pytest.mark.parametrize("shared", [[0, 5, 0], [1, 0, 0], [0, -1, 0], [0, 0]])
def test_a_sequence_shares_at_most_what_both_have(shared: list[int]) -> None:
    with pytest.raises(ValueError, match=r"sequences of \[4, 6, 3\] tokens share"):
        PackedSequences.of(np.array([0, 4, 10, 13]), "cpu").sharing(np.array(shared))
