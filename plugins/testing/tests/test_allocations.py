from __future__ import annotations

import torch

from corerl_testing.allocations import Allocations

KB = 256  # floats


def test_the_peak_is_what_is_held_at_once() -> None:
    with Allocations() as found:
        for _ in range(5):
            torch.zeros(3 * KB)  # gone at once
        kept = torch.ones(2 * KB)
        assert found.held == 2 * 1024
        both = torch.cat([kept, kept])
    assert (found.largest, found.peak, found.held) == (4 * 1024, 6 * 1024, 6 * 1024)
    del kept, both
    assert found.held == 0


def test_views_and_in_place_operations_do_not_count() -> None:
    before = torch.zeros(KB)
    with Allocations() as found:
        before.add_(1).view(16, 16)[3:].mul_(2)
        before.copy_(before)
        torch.empty(KB, device="meta")
    assert (found.largest, found.peak) == (0, 0)


def test_a_view_keeps_all_of_its_storage() -> None:
    with Allocations() as found:
        view = torch.zeros(KB)[:1]
        assert found.held == 1024
        view.untyped_storage().resize_(0)
        assert found.held == 0
