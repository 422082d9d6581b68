"""DeepSpeed inside of a worker: on the process group that is there, without its launcher, and nothing compiled."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import linear, parameter_offload
from deepspeed.utils import groups

from corerl.errors import ConfigError

# It tells each of its settings, and on every rank what it could not find.
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def join(device: torch.device, *, local_rank: int) -> None:
    """Take over torch's process group. Called on every rank, before anything else of DeepSpeed."""
    found = get_accelerator().device_name()
    if found != device.type:
        raise ConfigError(
            f"DeepSpeed took the accelerator {found!r} when it was imported, and this role runs on {device.type!r}; "
            f"set DS_ACCELERATOR={device.type} in cluster.environment"
        )
    # It reads these where its launcher would have put them.
    os.environ["LOCAL_RANK"] = str(local_rank)
    leave()
    # With gloo it compiles an operation for tensor-parallel inference, which nothing here calls.
    with mock.patch("deepspeed.comm.torch.build_shm_op", lambda: None):
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def leave() -> None:
    """Forget the process group: another one may come in this process. DeepSpeed's own groups end."""
    if comm.comm.cdb is None:
        return
    for group in (groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP):
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    groups._release_process_group_references()
    comm.comm.cdb = None


@contextmanager
def calling_deepspeed(*, partitioned: bool) -> Iterator[None]:
    """What every pass through the model and every step stand in. With `partitioned` parameters, matrices are multiplied
    by a function that does not keep gathered ones for the backward pass."""
    modules = parameter_offload.FWD_MODULE_STACK
    depth = len(modules)
    multiply = mock.patch("torch.nn.functional.linear", linear.zero3_linear_wrap) if partitioned else None
    with warnings.catch_warnings():
        # Of names that torch will change: nothing to mend for those who train.
        warnings.filterwarnings("ignore", category=FutureWarning)
        if multiply:
            multiply.start()
        try:
            yield
        finally:
            if multiply:
                multiply.stop()
            del modules[depth:]  # of a forward pass that was left by an exception
