import subprocess
import sys

import pytest

from corerl.config.schema import ClusterInfo
from corerl.engines.specs import FAKE, TRANSFORMERS, TransformersConfig


@pytest.mark.processes
def test_describing_the_engines_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, corerl.engines.specs; print(sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_replica_takes_a_device_where_there_are_some() -> None:
    for device, gpus in [("cpu", 0.0), ("cuda", 1.0)]:
        cluster = ClusterInfo(device=device, ranks=1)
        assert TRANSFORMERS.resources(TransformersConfig(), cluster).gpus == gpus
    assert FAKE.config().vocab_size == 16
