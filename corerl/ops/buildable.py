"""What is missing on this machine for Triton to build a kernel."""

from __future__ import annotations

import importlib.util
import os
import shutil


def lacking() -> str:
    """In words; "" where all is there."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # where Triton looks for one
        return "there is no C compiler (gcc, clang, or what CC names), which Triton builds with"
    return ""
