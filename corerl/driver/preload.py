"""Start what a run needs whatever its plan says, while the driver imports its code. Importing this loads no torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from corerl.cluster.forks import fork_server
from corerl.imports import uncollected
from corerl.plan.preload import Preload

LOOP = "corerl.loop"


@contextlib.contextmanager
def preloading(preload: Preload) -> Iterator[None]:
    """Import `corerl.loop`. While the block runs, Ray is there, if the run starts it, and ranks and engines are forked
    from a process that has imported their code. Where the loop was imported before, there is no time to gain, and Ray
    starts once the plan is made."""
    with contextlib.ExitStack() as stack:
        with uncollected(), ThreadPoolExecutor(1) as beside:
            early = preload.own_ray and LOOP not in sys.modules
            if early and preload.modules:
                stack.enter_context(fork_server(preload.modules, preload.environment))  # before there are threads
            importing = beside.submit(import_module, LOOP)
            if early:  # in this thread: Ray's processes end with the thread that has started them
                from corerl.cluster.runtime import CPUS, ray_session

                stack.enter_context(ray_session(address="", cpus=CPUS))
            importing.result()
        yield
