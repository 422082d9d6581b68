from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.processes
def test_an_engines_process_begins_without_torch() -> None:
    asked = "import sys, corerl.cluster.process, corerl.engines.service; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
