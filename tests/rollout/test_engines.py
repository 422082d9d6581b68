import subprocess
import sys

from corerl.config.schema import ClusterInfo
from corerl.rollout.engines import FAKE, TRANSFORMERS, TransformersConfig


def test_describing_the_engines_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, corerl.rollout.engines; print(sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_replica_on_a_cpu_keeps_to_one_thread_and_one_on_a_gpu_takes_a_device() -> None:
    for device, threads, gpus in [("cpu", "1", 0.0), ("cuda", None, 1.0)]:
        cluster = ClusterInfo(device=device, ranks=1)
        assert TRANSFORMERS.environment(TransformersConfig(), cluster).get("OMP_NUM_THREADS") == threads
        assert TRANSFORMERS.resources(TransformersConfig(), cluster).gpus == gpus
    assert FAKE.config().vocab_size == 16
