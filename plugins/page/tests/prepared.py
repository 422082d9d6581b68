"""Real runs of the quickstart to look at: one good, one whose answers are cut off, and one in which an engine keeps old
weights.

    python -m plugins.page.tests.prepared DIRECTORY          runs named as what they are
    python -m plugins.page.tests.prepared DIRECTORY x y z    under other names, by chance; DIRECTORY/answers.json tells
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from plugins.page.tests import engine

ROOT = Path(__file__).resolve().parents[3]
COMMON = (
    'extensions=[{name="console"},{name="jsonl",options={samples="all"}},{name="trace"},{name="page"}]',
    f"rollout.engine={engine.NAME}",
    "run.steps=40",
    "eval.every=10",
    "checkpoint.export=false",
    "algorithm.old_logprobs=recompute",
    "algorithm.on_mismatch=warn",
)
RUNS = {
    "good": (),
    "cut-off": ("rollout.max_tokens=3", "algorithm.overlong=keep", "algorithm.overlong_buffer=0"),
    "old-weights": (),
}


def prepare(directory: Path, kind: str, *more: str, name: str = "") -> Path:
    """Run it, and return its directory."""
    run_dir = directory / (name or kind)
    command = ["train", "examples/quickstart.toml", f"run.dir={run_dir}", *COMMON, *RUNS[kind], *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if kind == "old-weights":
        environment[engine.STALE] = "1"
    subprocess.run([Path(sys.executable).with_name("corerl"), *command], cwd=ROOT, env=environment, check=True)
    return run_dir


if __name__ == "__main__":
    directory, *names = sys.argv[1:]
    kinds = random.sample(list(RUNS), len(RUNS)) if names else list(RUNS)
    answers = dict(zip(names or kinds, kinds, strict=True))
    for each, kind in answers.items():
        prepare(Path(directory), kind, name=each)
    (Path(directory) / "answers.json").write_text(json.dumps(answers))
