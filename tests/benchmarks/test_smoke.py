"""Every benchmark runs in a small size on a CPU."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import DIFFERENT

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.usefixtures("forked_python")]

ROOT = Path(__file__).resolve().parents[2]
STARTED = sorted(
    ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "parse_args()" in path.read_text() and path.stem != "pack"  # which downloads
)
SMALL = [
    "engine_throughput 0.6b --tiny",
    "episodes --size 64 --concurrency 32 --rounds 1 --tokens 80",
    "grpo_step 0.6b --tiny",
    "grpo_step 30b-a3b --tiny",
    "grpo_step sources --tiny --steps 2",
    "grpo_step steady --tiny --steps 6",
    "memory fsdp --tiny",
    "peers.verl --tiny --side corerl --case ragged lora-8b-adapters --steps 2 --warm 1",
    "scale --tokens 1e5 --ranks 8 --rounds 1",
    "tinker --tiny --steps 3 --new 16",
    "train_step fsdp-cpu fsdp-cpu-4m --tiny --rounds 1",
    "train_step fsdp fsdp-0.6b megatron deepspeed-8b smollm2 sleep --tiny --rounds 1 --turns 1 --sleep",
    "weight_update collective-cpu 0.6b 8b-collective --tiny --rounds 1",
    "weight_update 0.6b --tiny --rounds 1 --engine sglang",
]


def run(*words: str) -> str:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_benchmark_has_a_small_size() -> None:
    assert sorted({words.split()[0] for words in SMALL}) == STARTED


@pytest.mark.parametrize("words", SMALL)
def test_both_sides_do_the_same_work_in_small_sizes(words: str, tmp_path: Path) -> None:
    name, *rest = shlex.split(words)
    if name == "tinker" and "TINKER_PYTHON" not in os.environ:
        pytest.skip("TINKER_PYTHON is not set; `make test-tinker` sets it")
    file = tmp_path / "found.json"
    said = run(f"benchmarks.{name}", *rest, "--output", str(file))
    assert DIFFERENT not in said and list(tmp_path.iterdir())
