"""Saves one checkpoint after another until it is killed: `python saver.py RUN_DIR`. Step n holds n everywhere."""

from __future__ import annotations

import itertools
import sys

import torch

from corerl.checkpoint.commit import begin, commit, retain
from corerl.checkpoint.writer import stage, write
from corerl.weights.chunks import Chunk

ROWS = 500_000  # 4 MB a rank


def main() -> None:
    torch.set_num_threads(1)
    for step in itertools.count(1):
        partial = begin(sys.argv[1], step)
        for rank in range(2):
            values = torch.full((ROWS, 2), float(step))
            chunk = Chunk("w", (2 * ROWS, 2), (rank * ROWS, 0), (ROWS, 2), values)
            write(stage({"master": [chunk]}, {}), partial / "actor", rank)
        retain(sys.argv[1], 2, committed=commit(partial, {"rollout_step": step}))
        print(step, flush=True)


if __name__ == "__main__":
    main()
