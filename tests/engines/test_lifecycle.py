from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.engines.lifecycle import EngineLifecycle, Shapes, shape_mismatch
from corerl.errors import EngineFailed
from corerl.weights.adapters import adapters_of
from corerl.weights.manifest import Bucket, build_manifest
from corerl.weights.transport import Address
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


def test_weights_do_not_change_while_calls_generate(tmp_path: Path) -> None:
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


def test_a_stale_version_and_a_refused_manifest_load_nothing(tmp_path: Path) -> None:
    serving = served(EngineLifecycle("engine-0", 0), tmp_path)
    manifest = build_manifest([("w", (2,))], dtype="float32", bucket_bytes=8)
    loaded: list[Bucket] = []

    def receive(version: int, refused: str) -> str:
        given = manifest, version, Address(transport="disk", engines=("engine-0",), path=str(tmp_path))
        take = lambda bucket, flat: loaded.append(bucket)  # noqa: E731
        return serving.receive(*given, check=lambda manifest: refused, load=take).error

    assert receive(7, "") == "version 7 is not newer than 7, which engine-0 already has"
    with serving.generating() as version:
        assert version == 7
    assert receive(8, "it has another shape") == "it has another shape"
    with pytest.raises(EngineFailed, match=r"to weights version 8 did not complete \(it has another"):
        serving.generating().__enter__()
    assert loaded == []


A, B = adapters_of("model.layers.0.self_attn.q_proj.weight")
WHOLE: Shapes = {"a": (2, 3), "b": (4,)}
ADAPTERS: Shapes = {A: (8, 3), B: (2, 8)}


@pytest.mark.parametrize(
    ("offered", "told"),
    [
        (WHOLE, ""),
        ({"a": (2, 3)}, "the trainer does not send 1 of the model's 2 tensors, such as 'b'"),
        ({**WHOLE, "c": (1,)}, "the model lacks 1 of the 3 tensors that were sent, such as 'c'"),
        ({**WHOLE, "a": (3, 2)}, "the trainer sends 'a' with shape [3, 2], but the model requires [2, 3]"),
        ({}, "the trainer does not send 2 of the model's 2 tensors, such as 'a'"),
        ({**WHOLE, **ADAPTERS}, f"the model lacks 2 of the 4 tensors that were sent, such as {A!r}"),
    ],
)
def test_an_update_has_exactly_the_models_tensors(offered: Shapes, told: str) -> None:
    assert shape_mismatch(offered, WHOLE) == told


def test_adapters_may_arrive_alone_once_the_engine_has_the_rest() -> None:
    held = {**WHOLE, **ADAPTERS}
    for whole in (False, True):
        assert shape_mismatch(held, held, whole=whole) == ""
        assert shape_mismatch(WHOLE, held, whole=whole).startswith("the trainer does not send 2 of the model's 4 tens")
    assert shape_mismatch(ADAPTERS, held, whole=True) == ""
    assert shape_mismatch(ADAPTERS, held, whole=False).startswith("adapters have arrived alone, but the engine lacks")
    assert shape_mismatch({A: (8, 3)}, held, whole=True).startswith("the trainer does not send 1 of the model's 2 ")
