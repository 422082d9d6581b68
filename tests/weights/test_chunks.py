from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from corerl.errors import ModelError
from corerl.weights.chunks import Chunk, fill, flat_range_boxes, flat_range_views, within


class Memory:
    """A source of tensors that lie in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        tensor = self.tensors[name]
        return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


@pytest.mark.parametrize("shape", [(), (7,), (1, 5), (5, 1), (3, 4), (2, 3, 4), (1, 1)])
def test_boxes_of_a_flat_range_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = flat_range_boxes(shape, start, stop)
            zero = ((0,) * len(shape), shape)
            got = [value for box in boxes for value in whole[within(box, zero)].reshape(-1).tolist()]
            assert got == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4)])
def test_views_of_a_flat_range_share_the_given_storage(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    for start in range(numel):
        whole = torch.zeros(shape)
        values = torch.arange(float(start), numel)
        for box, view in flat_range_views(shape, start, values):
            whole[within(box, ((0,) * len(shape), shape))] = view
            view.neg_()
        assert whole.reshape(-1).tolist() == [0.0] * start + list(range(start, numel))
        assert values.tolist() == [-value for value in range(start, numel)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_fill_takes_no_values_that_are_not_finite(value: float) -> None:
    values = torch.zeros(4, 2, dtype=torch.bfloat16)
    values[3, 1] = value
    view = torch.full((1, 2), 7.0)
    rows = [Chunk("w", (4, 2), (row, 0), (1, 2), view) for row in (2, 3)]
    assert fill(rows[:1], Memory({"w": values}), what="model/x") == 4 and view.tolist() == [[0, 0]]
    with pytest.raises(ModelError, match="^model/x has NaN or infinite values in 'w'; use weights that have none$"):
        fill(rows[1:], Memory({"w": values}), what="model/x")


def test_fill_names_a_missing_tensor_and_one_of_another_shape() -> None:
    source = Memory({"w": torch.zeros(3, 4)})
    with pytest.raises(ModelError, match=r"memory has no tensor 'v' of shape \[2\]"):
        fill([Chunk("v", (2,), (0,), (2,), torch.zeros(2))], source, what="memory")
    with pytest.raises(ModelError, match=r"memory has 'w' with shape \[3, 4\], but the model needs \[3, 5\]"):
        fill([Chunk("w", (3, 5), (0, 0), (3, 5), torch.zeros(3, 5))], source, what="memory")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_fill_takes_no_quantized_numbers_for_weights(dtype: torch.dtype) -> None:
    view = torch.full((2,), torch.nan)
    source = Memory({"w": torch.ones(2).to(dtype)})
    with pytest.raises(ModelError, match=f"memory has 'w' quantized as {dtype}, wanted 16 or 32 bits"):
        fill([Chunk("w", (2,), (0,), (2,), view)], source, what="memory")
    assert view.isnan().all()
