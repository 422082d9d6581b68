from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.engines.lifecycle import EngineLifecycle
from corerl.errors import EngineFailed
from tests.engines.models import update

LIMIT = 60.0  # seconds, against hangs


class Carrier:
    """As much of an engine as an update asks for."""

    def __init__(self, serving: EngineLifecycle) -> None:
        self.serving = serving

    def receive(self, *given: Any) -> Any:
        return self.serving.receive(*given, check=lambda manifest: "", load=lambda bucket, flat: None)


def served(serving: EngineLifecycle, directory: Path) -> EngineLifecycle:
    """With weights of version 7."""
    update([Carrier(serving)], {"w": torch.ones(2)}, version=7, path=directory)  # type: ignore[list-item]
    return serving


def test_as_many_calls_as_are_allowed_generate_side_by_side_and_nothing_changes_weights_meanwhile(
    tmp_path: Path,
) -> None:
    serving = served(EngineLifecycle("engine-0", 0, calls=2), tmp_path)
    both = threading.Barrier(3, timeout=LIMIT)
    inside: list[int] = []

    def generate() -> None:
        with serving.generating() as version:
            inside.append(version)
            both.wait()  # both are inside
            both.wait()

    def drop() -> None:
        with serving.dropping_weights("they are gone"):
            inside.append(-1)

    threads = [threading.Thread(target=generate) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait()
    changing = threading.Thread(target=drop)
    changing.start()
    assert inside == [7, 7]
    both.wait()
    for thread in (*threads, changing):
        thread.join(LIMIT)
    assert inside == [7, 7, -1]
    with pytest.raises(EngineFailed, match="engine-0 cannot generate: they are gone"), serving.generating():
        raise AssertionError("it must not come to this")


def test_it_is_paused_once_nothing_is_generated_and_until_it_is_resumed(tmp_path: Path) -> None:
    serving = served(EngineLifecycle("engine-0", 0), tmp_path)
    begun = threading.Event()

    def generate() -> None:
        with serving.generating():
            begun.set()
            while not serving.paused:  # a token after the other
                pass

    generating = threading.Thread(target=generate)
    generating.start()
    assert begun.wait(LIMIT)
    serving.pause()
    with serving.generating():  # so nobody else is inside
        assert serving.paused
    generating.join(LIMIT)
    serving.resume()
    assert not serving.paused
