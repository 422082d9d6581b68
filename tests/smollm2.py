"""SmolLM2-135M-Instruct as docs/tutorial-smollm2.md makes it, where the Makefile keeps it for tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.in_process import HERE

EXAMPLES = Path(__file__).parents[1] / "examples" / "environments"
MODEL = Path(sys.prefix) / "smollm2"
NEEDED = 6.0  # GiB of memory of a run in one process
# In this process, whose backend computes in float32.
RUN = [*HERE, "train.precision=float32", f"model.path={MODEL}", 'extensions=[{name="jsonl",options={samples="all"}}]']
needs_smollm2 = pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} is not there; `make smollm2` makes it")


def lines_of(config: Path) -> list[str]:
    """Those that say something."""
    return [line for line in config.read_text().splitlines() if line and not line.startswith("#")]
