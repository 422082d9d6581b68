"""Check what SGLang needs on this machine, for `corerl doctor`, without importing it, which takes 20 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from corerl.plugin import Finding, Level, check_library
from corerl_sglang.config import INSTALL

OLDEST, END = (0, 5, 15), (0, 6)  # SGLang versions, as in pyproject.toml


def probe() -> Iterator[Finding]:
    import torch

    found = check_library(
        "SGLang",
        "sglang",
        oldest=OLDEST,
        end=END,
        why="it relies on how those versions answer requests and load weights",
        fix=INSTALL,
        plugin="engine",
    )
    yield found
    if found.level is not Level.OK:
        return
    installed = metadata.version("sglang")
    for package, wanted in sorted(exact(metadata.requires("sglang") or [])):
        try:
            there = metadata.version(package)
        except metadata.PackageNotFoundError:
            there = "none"
        if there.partition("+")[0] != wanted:
            yield Finding(
                level=Level.WARNING,
                what=f"SGLang {installed} requires {package} {wanted}, but {there} is installed",
                why="its server may not start",
                fix=f"python -m pip install '{package}=={wanted}'",
            )
    if not torch.cuda.is_available():
        yield Finding(
            level=Level.WARNING,
            what="torch sees no CUDA device",
            why="without a GPU a server is slow, if it runs at all",
            fix="run it on a machine with a GPU, or choose rollout.engine='transformers'",
        )


def exact(requirements: list[str]) -> Iterator[tuple[str, str]]:
    """(package, version) of SGLang's exactly pinned requirements that CoreRL imports too."""
    for requirement in requirements:
        package, _, version = requirement.partition(";")[0].strip().partition("==")
        if package in ("torch", "transformers") and version:
            yield package, version
