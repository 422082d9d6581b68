"""Why Triton cannot build a kernel on this machine. Specs of plugins ask this too, so nothing here loads torch."""

from __future__ import annotations

import importlib.util
import os
import shutil


def why_unbuildable() -> str:
    """What is missing, in words; "" if nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # where Triton looks
        return "there is no C compiler for Triton (gcc, clang, or the one that CC names)"
    return ""
