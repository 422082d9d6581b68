from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.imports import importable, uncollected


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_within_and_what_was_there_is_passed_over_after() -> None:
    with uncollected():
        assert not gc.isenabled()
        kept = weakref.ref(Loop())
    assert gc.isenabled()
    gc.collect()
    assert kept() is not None
    later = weakref.ref(Loop())
    gc.collect()
    assert later() is None


def test_an_import_that_fails_leaves_collections_on_and_one_without_them_leaves_them_off() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError("a library that is not there")
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_can_be_imported_differs_after_something_is_put_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = importable()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "nothing")
    os.utime(tmp_path, ns=(0, 1))  # else the clock of a file system may be too coarse to tell
    there = importable()
    (tmp_path / "module.py").touch()
    assert set(there) - set(before) == {(str(tmp_path), 1), (str(tmp_path / "nothing"), 0)}
    assert importable() != there
