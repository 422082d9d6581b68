from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from corerl.imports import uncollected


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
