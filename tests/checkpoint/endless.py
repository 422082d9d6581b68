"""Writes one checkpoint after another, of which number n holds n everywhere, until it is killed: `python endless.py
RUN_DIR`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import corerl
from corerl.checkpoint.commit import begin, commit, latest, read_state, retain
from corerl.checkpoint.reader import CheckpointSource
from corerl.checkpoint.writer import stage, write
from corerl.weights.chunks import Chunk

RANKS, ROWS = 2, 500_000  # 4 MB a rank


def require_newest_of_killed(run_dir: Path, *, made: int, moment: Callable[[], bool]) -> None:
    """Kill such a process at a `moment` after so many checkpoints; the newest is complete then, and no older."""
    environment = {**os.environ, "PYTHONPATH": str(Path(corerl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, __file__, str(run_dir)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for _ in range(made):
            done = int(process.stdout.readline())
        while not moment():
            assert process.poll() is None
        process.kill()
    newest = latest(run_dir)
    assert newest is not None
    step = read_state(newest)["rollout_step"]
    assert step >= done
    source = CheckpointSource(newest / "actor", "master")
    assert torch.equal(source.read("w", (0, 0), (RANKS * ROWS, 2)), torch.full((RANKS * ROWS, 2), float(step)))
    source.verify(rank=0, world_size=1)


def state(rank: int, step: int) -> dict[str, list[Chunk]]:
    values = torch.full((ROWS, 2), float(step))
    return {"master": [Chunk("w", (RANKS * ROWS, 2), (rank * ROWS, 0), (ROWS, 2), values)]}


def save(run_dir: str) -> None:
    for step in itertools.count(1):
        partial = begin(run_dir, step)
        for rank in range(RANKS):
            write(stage(state(rank, step), {}), partial / "actor", rank)
        retain(run_dir, 2, committed=commit(partial, {"rollout_step": step}))
        print(step, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    save(sys.argv[1])
