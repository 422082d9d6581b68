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
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime.zero import linear, parameter_offload
from deepspeed.utils import groups

ACCELERATORS = {"cpu": CPU_Accelerator, "cuda": CUDA_Accelerator}

# It tells each of its settings, and on every rank what it could not find.
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def join(device: torch.device, *, local_rank: int) -> None:
    """Take over torch's process group. Called on every rank, before anything else of DeepSpeed."""
    if get_accelerator().device_name() != device.type:  # it chose when it was imported
        set_accelerator(ACCELERATORS[device.type]())
    os.environ["LOCAL_RANK"] = str(local_rank)  # it reads this again and again, where its launcher would have put it
    leave()
    # With gloo it compiles an operation for tensor-parallel inference, which nothing here calls.
    with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    # Else a second group of all ranks, with a communicator of its own (some 400 MB of each GPU) and threads that poll.
    groups._WORLD_GROUP = dist.group.WORLD


def leave() -> None:
    """Forget the process group: another one may come in this process. DeepSpeed's own group ends."""
    if comm.comm.cdb is None:
        return
    own = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    if own is not None and own in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(own)
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
            # Those of a pass that an exception has left; and the model, which would live as long as the process.
            del modules[depth:]
