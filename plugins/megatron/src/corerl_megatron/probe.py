"""Check this machine for what Megatron needs, for `corerl doctor`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata

from attrs import evolve

from corerl.plugin import Finding, Level, check_library, check_nccl, ok

OLDEST, END = (0, 16), (0, 20)  # megatron-core's, as in pyproject.toml
MEND = "python -m pip install 'megatron-core>=0.16,<0.20'"


def probe() -> Iterator[Finding]:
    """Imports torch only when called, so that the spec that refers to it stays light."""
    import torch
    import torch.distributed as dist

    yield check_library(
        "megatron-core",
        "megatron-core",
        oldest=OLDEST,
        end=END,
        why="its arguments and its checkpoints change from version to version",
        fix=MEND,
    )
    yield from _bridge()
    if not torch.cuda.is_available():
        yield ok("no GPU: layers are plain torch, and ranks communicate through gloo")
        return
    yield from check_nccl(gpus=True, available=dist.is_nccl_available())
    if importlib.util.find_spec("transformer_engine") is None:
        yield Finding(
            level=Level.WARNING,
            what="TransformerEngine is not installed",
            why="layers are plain torch: slower, without FP8, and context-parallel ranks gather all keys and values",
            fix="python -m pip install --no-build-isolation 'transformer_engine[pytorch,core_cu13]', or core_cu12",
        )
        return
    try:
        import transformer_engine.pytorch  # noqa: F401  -- loads its compiled part
    except Exception as error:  # another torch's ABI, a missing library: its loader may raise anything
        yield Finding(
            level=Level.ERROR,
            what=f"TransformerEngine is installed but does not load: {' '.join(str(error).split())}",
            why="its compiled part works with only one version of torch",
            fix="python -m pip install --no-build-isolation --force-reinstall 'transformer_engine[pytorch]'",
        )
    else:
        engine = metadata.version("transformer_engine")
        yield ok(f"TransformerEngine {engine} loads")


def _bridge() -> Iterator[Finding]:
    """About Megatron-Bridge, if it is installed: only `bridge=true` uses it."""
    if not list(metadata.distributions(name="megatron-bridge")):
        return
    found = check_library(
        "Megatron-Bridge",
        "megatron-bridge",
        oldest=(0, 6),
        end=(0, 7),
        why="backends.megatron.bridge reads its mappings, whose code changes from version to version",
        fix="python -m pip install --no-deps 'megatron-bridge>=0.6,<0.7'",
    )
    yield found if found.level is Level.OK else evolve(found, level=Level.WARNING)
