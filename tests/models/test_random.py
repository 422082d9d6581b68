from __future__ import annotations

import pytest
import torch

from corerl.errors import ModelError
from corerl.models.build import build_on_meta
from corerl.models.names import hf_boxes
from corerl.models.random import RandomSource
from corerl.ops.noise import normal
from corerl_testing.models import tiny_config


def whole(source: RandomSource, name: str) -> torch.Tensor:
    shape = source.shape(name)
    assert shape is not None
    return source.read(name, (0,) * len(shape), shape)


def test_a_box_has_the_values_that_the_whole_tensor_has_there(monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomSource(tiny_config("qwen3"), {"w": (7, 5, 6)}, seed=3)
    full = whole(source, "w")
    for offsets, sizes in [
        ((0, 0, 0), (7, 5, 6)),
        ((2, 1, 3), (4, 3, 2)),
        ((6, 4, 5), (1, 1, 1)),
        ((1, 0, 0), (0, 5, 6)),
    ]:
        part = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assert torch.equal(source.read("w", offsets, sizes), full[part])
    monkeypatch.setattr("corerl.models.random.VALUES", {"cpu": 40})
    assert torch.equal(whole(source, "w"), full)


def test_only_the_box_that_is_asked_for_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def counted(key: int, counters: torch.Tensor) -> torch.Tensor:
        drawn.append(counters.numel())
        return normal(key, counters)

    monkeypatch.setattr("corerl.models.random.normal", counted)
    RandomSource(tiny_config("qwen3"), {"w": (1000, 1000)}, seed=0).read("w", (10, 20), (5, 6))
    assert sum(drawn) == 30


def test_values_depend_on_seed_and_name_and_on_nothing_else() -> None:
    config, shape = tiny_config("qwen3"), (50, 40)
    values = [
        whole(RandomSource(config, {name: shape, "other": (2, 2)}, seed), name)
        for name, seed in [("a", 0), ("a", 1), ("b", 0), ("a", 0)]
    ]
    assert torch.equal(values[0], values[3])
    for other in values[1:3]:
        assert abs(torch.corrcoef(torch.stack([values[0].flatten(), other.flatten()]))[0, 1]) < 0.1


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_weights_begin_as_transformers_begins_them(kind: str) -> None:
    config = tiny_config(kind)
    config.initializer_range = 0.05
    boxes = hf_boxes(build_on_meta(config, dtype=torch.float32, attention="sdpa"))
    shapes = {box.name: box.shape for found in boxes.values() for box in found}
    source = RandomSource(config, shapes, seed=0)
    for name in shapes:
        values = whole(source, name)
        if "norm" in name:
            assert torch.equal(values, torch.ones(shapes[name])), name
        elif name.endswith("bias"):
            assert torch.equal(values, torch.zeros(shapes[name])), name
        else:
            error = 4 * 0.05 / values.numel() ** 0.5
            assert abs(float(values.mean())) < error and abs(float(values.std()) - 0.05) < error, name
    assert source.shape("unknown") is None


def test_a_vector_of_unknown_purpose_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no initialization is known for 'layers.0.A_log' \[8\]"):
        RandomSource(tiny_config("qwen3"), {"layers.0.A_log": (8,)}, seed=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"w": (700, 1001), "norm.weight": (5,)}
    on_cpu, on_gpu = (RandomSource(tiny_config("qwen3"), shapes, 3, device) for device in ("cpu", "cuda"))
    for name in shapes:
        drawn = whole(on_gpu, name)
        assert drawn.is_cuda
        torch.testing.assert_close(drawn.cpu(), whole(on_cpu, name), rtol=1e-6, atol=0)
    full = whole(on_gpu, "w")
    monkeypatch.setattr("corerl.models.random.VALUES", {"cuda": 4000})
    assert torch.equal(on_gpu.read("w", (100, 7), (300, 900)), full[100:400, 7:907])
