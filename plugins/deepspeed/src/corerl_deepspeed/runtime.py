"""Run DeepSpeed inside a worker: on the existing process group, without its launcher and without compiling anything."""

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

# It logs every setting, and on every rank whatever it could not find.
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def join(device: torch.device, *, local_rank: int) -> None:
    """Make DeepSpeed use torch's process group. Called on every rank, before anything else of DeepSpeed."""
    if get_accelerator().device_name() != device.type:  # chosen on import
        set_accelerator(ACCELERATORS[device.type]())
    os.environ["LOCAL_RANK"] = str(local_rank)  # DeepSpeed rereads this; its launcher would set it
    leave()
    # With gloo it would compile an operation for tensor-parallel inference, which nothing here calls.
    with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    # Else it makes a second group of all ranks, with its own communicator (400 MB on each GPU) and polling threads.
    groups._WORLD_GROUP = dist.group.WORLD


def leave() -> None:
    """Forget the process group, since this process may get another one, and destroy DeepSpeed's own group."""
    if comm.comm.cdb is None:
        return
    own = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    if own is not None and own in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(own)
    groups._release_process_group_references()
    comm.comm.cdb = None


@contextmanager
def calling_deepspeed(*, partitioned: bool) -> Iterator[None]:
    """Wrap every pass through the model and every step in this block. With `partitioned` parameters, matrix products do
    not keep gathered weights for the backward pass."""
    modules = parameter_offload.FWD_MODULE_STACK
    depth = len(modules)
    multiply = mock.patch("torch.nn.functional.linear", linear.zero3_linear_wrap) if partitioned else None
    with warnings.catch_warnings():
        # Warnings about names that torch will change, which users cannot fix.
        warnings.filterwarnings("ignore", category=FutureWarning)
        if multiply:
            multiply.start()
        try:
            yield
        finally:
            if multiply:
                multiply.stop()
            # Drop modules left by a pass that raised, and the model, which would otherwise live as long as the process.
            del modules[depth:]
