"""Start what a run needs whatever its plan says, while the driver imports its code. Importing this loads no torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from corerl.cluster.forks import fork_server
from corerl.imports import uncollected
from corerl.plan.preload import Preload


@contextlib.contextmanager
def preloading(preload: Preload) -> Iterator[None]:
    """Import `corerl.loop`. While the block runs, Ray is there, if the run starts it, and ranks and engines are forked
    from a process that has imported their code."""
    with contextlib.ExitStack() as stack:
        with uncollected(), ThreadPoolExecutor(1) as beside:
            ray: Any = sys.modules.get("ray")
            starts_ray = preload.own_ray and (ray is None or not ray.is_initialized())
            if starts_ray and preload.modules:
                stack.enter_context(fork_server(preload.modules, preload.environment))  # before there are threads
            importing = beside.submit(import_module, "corerl.loop")
            if starts_ray:  # in this thread: Ray's processes end with the thread that has started them
                from corerl.cluster.runtime import CPUS, ray_session

                stack.enter_context(ray_session(address="", cpus=CPUS))
            importing.result()
        yield
