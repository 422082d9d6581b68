"""Check this machine for what DeepSpeed needs, for `corerl doctor`."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

from corerl.plugin import Finding, Level, check_library, check_nccl, ok

OLDEST, END = (0, 19, 8), (0, 20)  # DeepSpeed's, as in pyproject.toml
MEND = "python -m pip install 'deepspeed>=0.19.8,<0.20'"


def probe() -> Iterator[Finding]:
    """Imports torch and DeepSpeed only when called, so that the spec that refers to it stays light."""
    import torch
    import torch.distributed as dist

    found = check_library(
        "DeepSpeed",
        "deepspeed",
        oldest=OLDEST,
        end=END,
        why="it relies on where these versions store weights, masters and moments",
        fix=MEND,
    )
    yield found
    yield from check_nccl(gpus=torch.cuda.is_available(), available=dist.is_nccl_available())
    if found.level is Level.OK:
        yield from _operations()


def _operations() -> Iterator[Finding]:
    """List DeepSpeed's compiled operations, for those who use them elsewhere; nothing here needs them."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            from deepspeed.git_version_info import installed_ops
            from deepspeed.ops.op_builder.all_ops import ALL_OPS
            from deepspeed.ops.op_builder.builder import probe_is_compatible

            built = sorted(name for name, is_built in installed_ops.items() if is_built)
            others = sorted(name for name in ALL_OPS if name not in built and probe_is_compatible(ALL_OPS[name]))
    except Exception as error:  # its compiled parts and machine checks may raise anything
        yield Finding(
            level=Level.ERROR,
            what=f"DeepSpeed is installed but does not load: {' '.join(str(error).split())}",
            why="this backend is built on it",
            fix=f"{MEND} --force-reinstall --no-deps",
        )
        return
    yield ok(
        f"DeepSpeed operations already built: {', '.join(built) or 'none'}; that could be built: "
        f"{', '.join(others) or 'none'}; this backend uses none of them"
    )
