"""What ranks do for the tests of this plugin beyond the shared checks."""

from __future__ import annotations

from pathlib import Path

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


def threads_of_builds(setup: Setup, builds: int) -> list[int]:
    """Threads of this process while each of several backends is there, the earlier ones shut down."""
    found = []
    for _ in range(builds):
        with running(setup) as worker:
            train(worker, setup, 0)
            found.append(len(list(Path("/proc/self/task").iterdir())))
    return found
