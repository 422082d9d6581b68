"""What the specs of several plugins share: findings about the libraries underneath, and slow paths with their prices.
Imports nothing heavy, since specs need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata

from corerl.config.schema import ClusterInfo
from corerl.kinds import InPieces, ModelSize
from corerl.plugin.spec import UNMEASURED, Finding, Level, SlowPath, ok

Version = tuple[int, ...]

REINSTALL_TORCH = "python -m pip install --force-reinstall torch"


def check_library(
    name: str, distribution: str, *, oldest: Version, end: Version, why: str, fix: str, plugin: str = "backend"
) -> Finding:
    """Whether the library underneath a plugin is installed in a version v with `oldest` <= v < `end`; `why` says why
    other versions will not do. `plugin` is backend or engine."""
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return Finding(level=Level.ERROR, what=f"{name} is not installed", why=f"this {plugin} is built on it", fix=fix)
    if oldest <= version_numbers(installed)[: len(oldest)] and version_numbers(installed)[: len(end)] < end:
        return ok(f"{name} {installed} is supported by this {plugin}")
    return Finding(
        level=Level.ERROR,
        what=f"{name} {installed} is not supported by this {plugin}",
        why=why,
        fix=fix,
    )


def version_numbers(text: str) -> Version:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0), 0.17.0rc1 is (0, 17)."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def check_nccl(*, gpus: bool, available: bool) -> Iterator[Finding]:
    """An error finding if torch sees GPUs but has no NCCL for ranks on them to communicate."""
    if gpus and not available:
        yield Finding(
            level=Level.ERROR,
            what="torch sees CUDA devices, but torch.distributed has no NCCL",
            why="ranks on GPUs communicate through it",
            fix=REINSTALL_TORCH,
        )


# Prices are of whole steps, of `python -m benchmarks.train_step` on an H100: docs/models.md has the table of all.
IN_PIECES: Mapping[InPieces, str] = {
    InPieces.HEADS: "a step takes 1.2 times as long",
    InPieces.SINKS: "a step takes 1.1 times as long",
    InPieces.CAPS: "a step takes 1.2 times as long",
    InPieces.STATE: UNMEASURED,
}


def slow_attention(cluster: ClusterInfo, size: ModelSize) -> Iterator[SlowPath]:
    """What packed attention costs where it is more than one kernel for the sake of the model."""
    packed = cluster.train is None or cluster.train.layout != "whole"
    why = size.in_pieces
    if packed and why is not None and why in IN_PIECES:
        yield SlowPath(
            path=".model",
            text=f"attention runs on padded rows instead of one kernel over packed tokens, because {why}",
            price=IN_PIECES[why],
            instead="no setting avoids it, only another model",
        )
