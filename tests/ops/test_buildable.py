from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from corerl.ops.buildable import why_unbuildable


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with Triton, and no program on its path."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_kernels_are_built_where_there_is_a_c_compiler(nothing: Path, compiler: str) -> None:
    assert why_unbuildable().startswith("there is no C compiler")
    (nothing / compiler).write_text("#!/bin/sh\n")
    (nothing / compiler).chmod(0o755)
    assert why_unbuildable() == ""


def test_one_that_has_another_name_is_named_by_the_environment(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "icx")
    assert why_unbuildable() == ""


def test_triton_itself_may_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_unbuildable() == "Triton is not installed"
