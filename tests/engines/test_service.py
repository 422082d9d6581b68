from __future__ import annotations

import subprocess
import sys

import pytest

from corerl.config.schema import ClusterInfo
from corerl_transformers.spec import SPEC as TRANSFORMERS
from corerl_transformers.spec import TransformersConfig


@pytest.mark.processes
def test_an_engines_process_begins_without_torch() -> None:
    asked = "import sys, corerl.cluster.process, corerl.engines.service; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_replica_takes_a_device_where_there_are_some() -> None:
    for device, gpus in [("cpu", 0.0), ("cuda", 1.0)]:
        cluster = ClusterInfo(device=device, ranks=1)
        assert TRANSFORMERS.resources(TransformersConfig(), cluster).gpus == gpus
