"""Makes one copy after another until it is killed: `python copier.py RUN_DIR`. Copy n holds n everywhere."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from corerl.checkpoint.commit import begin, begin_over, commit, put_aside
from corerl.checkpoint.copies import StateCopies
from corerl.weights.chunks import Chunk

ROWS = 500_000  # 4 MB a rank


def main() -> None:
    torch.set_num_threads(1)
    ranks = [StateCopies(torch.device("cpu")) for _ in range(2)]
    newest: Path | None = None
    spare: Path | None = None
    for step in itertools.count(1):
        partial = begin(sys.argv[1], step) if spare is None else begin_over(spare, step, {"actor": 2})
        for rank, copies in enumerate(ranks):
            values = torch.full((ROWS, 2), float(step))
            chunk = Chunk("w", (2 * ROWS, 2), (rank * ROWS, 0), (ROWS, 2), values)
            copies.begin(partial / "actor", rank, {"master": [chunk]}, {})
        for copies in ranks:
            copies.complete(wait=True)
        before, newest = newest, commit(partial, {"rollout_step": step}, ranks={"actor": 2})
        spare = put_aside(before) if before is not None else None
        print(step, flush=True)


if __name__ == "__main__":
    main()
