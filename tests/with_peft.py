"""Run programs that import peft, the reference for adapters: it needs accelerate, which `make setup` keeps apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks.client import Forked

ROOT = Path(__file__).parents[1]
PACKAGES = Path(sys.prefix) / "tutorial"
needs_peft = pytest.mark.skipif(not (PACKAGES / "peft").exists(), reason=f"{PACKAGES} lacks peft; `make setup` has it")


def run_with_peft(code: str, asked: Any, directory: Path) -> Any:
    """What `code` has bound to `found`, given `asked`: plain data and tensors. `directory` is for files in between."""
    given, gave = directory / "asked.pt", directory / "found.pt"
    torch.save(asked, given)
    program = f"import sys, torch\nasked = torch.load(sys.argv[1])\n{code}\ntorch.save(found, sys.argv[2])\n"
    with (directory / "err").open("w+b") as err:
        process = Forked(
            ["-c", given, gave],
            program,
            environment={**os.environ, "PYTHONPATH": f"{PACKAGES}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"},
            stdout=err,
            stderr=err,
        )
        assert process.wait() == 0, Path(err.name).read_text()
    return torch.load(gave)
