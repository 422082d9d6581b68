"""What ranks do for the tests of this plugin beyond the shared checks."""

from __future__ import annotations

from corerl.testing.harness import Setup, running, train


def padding_after_steps(setup: Setup, steps: int) -> list[tuple[int, float]]:
    """For each vocabulary parameter with padding on this rank: its rows of padding, and the largest value in them."""
    with running(setup) as worker:
        for number in range(steps):
            train(worker, setup, number)
        found = []
        for held in worker.backend.model.held:  # type: ignore[attr-defined]
            rows = max((piece.start[0] + piece.sizes[0] for piece in held.pieces), default=0)
            padding = held.param.detach()[rows:]
            if len(padding):
                found.append((len(padding), float(padding.abs().max())))
        return found
