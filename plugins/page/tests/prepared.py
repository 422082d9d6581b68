"""Three real runs of the quickstart for people to look at: one good, one whose answers are cut off, and one in which an
engine keeps old weights.

    python -m plugins.page.tests.prepared DIRECTORY
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from plugins.page.tests import stale_engine

ROOT = Path(__file__).resolve().parents[3]
COMMON = (
    'extensions=[{name="console"},{name="jsonl",options={samples="all"}},{name="trace"},{name="page"}]',
    "run.steps=40",
    "eval.every=10",
    "checkpoint.export=false",
    "algorithm.old_logprobs=recompute",
)
RUNS = {
    "good": (),
    "cut-off": ("rollout.max_tokens=3", "algorithm.overlong=keep", "algorithm.overlong_buffer=0"),
    "old-weights": (f"rollout.engine={stale_engine.NAME}", "algorithm.on_mismatch=warn"),
}


def prepare(directory: Path, name: str, *more: str) -> Path:
    """Run it, and return its directory."""
    run_dir = directory / name
    command = ["train", "examples/quickstart.toml", f"run.dir={run_dir}", *COMMON, *RUNS[name], *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([Path(sys.executable).with_name("corerl"), *command], cwd=ROOT, env=environment, check=True)
    return run_dir


if __name__ == "__main__":
    for each in RUNS:
        prepare(Path(sys.argv[1]), each)
