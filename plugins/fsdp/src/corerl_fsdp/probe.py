"""Check this machine's torch for what FSDP needs, for `corerl doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from corerl.plugin import REINSTALL_TORCH, Finding, Level, check_nccl, ok, version_numbers

OLDEST = (2, 9)  # torch's, as in pyproject.toml
TESTED = (2, 13)  # the newest that passed all tests


def probe() -> Iterator[Finding]:
    """Imports torch only when called, so that the spec that refers to it stays light."""
    import torch
    import torch.distributed as dist

    installed = version_numbers(torch.__version__)[:2]
    if installed < OLDEST:
        yield Finding(
            level=Level.ERROR,
            what=f"torch {torch.__version__} is older than {_dotted(OLDEST)}",
            why="its fully_shard lacks features that this backend needs",
            fix=f"python -m pip install 'torch>={_dotted(OLDEST)}'",
        )
    elif installed > TESTED:
        yield Finding(
            level=Level.WARNING,
            what=f"torch {torch.__version__} is newer than {_dotted(TESTED)}, the newest tested version",
            why="features of fully_shard that this backend needs may have changed",
            fix="python -m pip install --upgrade corerl-fsdp",
        )
    else:
        yield ok(f"torch {torch.__version__} works with FSDP")
    if not dist.is_available():
        yield Finding(
            level=Level.ERROR,
            what=f"torch {torch.__version__} was built without torch.distributed",
            why="ranks, even a single one, cannot start without it",
            fix=REINSTALL_TORCH,
        )
        return
    if not dist.is_gloo_available():
        yield Finding(
            level=Level.ERROR,
            what="torch.distributed has no gloo",
            why="ranks on CPUs, and the CPU side of ranks on GPUs, communicate through it",
            fix=REINSTALL_TORCH,
        )
    yield from check_nccl(gpus=torch.cuda.is_available(), available=dist.is_nccl_available())
    there = {"gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available()}
    names = " and ".join(name for name, available in there.items() if available)
    yield ok(f"torch.distributed has {names or 'no backend for ranks to communicate through'}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
