from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from corerl_transports.shared import ALLOCATOR, outside_expandable_segments


def settings() -> str:
    """What torch's allocator was told last."""
    return str(torch._C._accelerator_getAllocatorSettings())


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell what its allocator was set to")
    before = settings()
    yield monkeypatch
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("name", ALLOCATOR)
def test_shared_memory_alone_is_outside_expandable_segments(as_it_was: pytest.MonkeyPatch, name: str) -> None:
    users = "expandable_segments:True,max_split_size_mb:64"
    as_it_was.setenv(name, users)
    with outside_expandable_segments():
        assert settings() == "expandable_segments:False"
    assert settings() == users
    with pytest.raises(MemoryError), outside_expandable_segments():
        raise MemoryError
    assert settings() == users


def test_an_allocator_without_expandable_segments_is_left_alone(as_it_was: pytest.MonkeyPatch) -> None:
    before = settings()
    as_it_was.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with outside_expandable_segments():
        assert settings() == before
    assert settings() == before
