"""Which boxes of which tensors a function returns, and what it says of one that does more than move them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from corerl.errors import ModelError
from corerl_megatron.boxes import trace
from corerl_megatron.chunks import Piece

CPU = torch.device("cpu")
SHAPES = {"gate": (4, 3), "up": (4, 3), "experts": (6, 5, 3), "norm": (4,), "kernel": (4, 1, 2), "row": (1, 3)}
Function = Callable[[Mapping[str, Tensor]], Tensor]


def padded(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors["gate"][2:], tensors["up"][2:], tensors["gate"].new_zeros(1, 3)])


@pytest.mark.parametrize(
    ("function", "shape", "pieces"),
    [
        (
            padded,
            (5, 3),
            [
                Piece("gate", (4, 3), (2, 0), (0, 0), (2, 3), (0, 1)),
                Piece("up", (4, 3), (2, 0), (2, 0), (2, 3), (0, 1)),
            ],
        ),
        (
            lambda tensors: tensors["experts"][2].t().contiguous()[1:],
            (2, 5),
            [Piece("experts", (6, 5, 3), (2, 0, 1), (0, 0), (2, 5), (None, 1, 0))],
        ),
        (lambda tensors: tensors["norm"], (4,), [Piece("norm", (4,), (0,), (0,), (4,), (0,))]),
        (
            lambda tensors: tensors["kernel"].flip(0)[2:],
            (2, 1, 2),
            [
                Piece("kernel", (4, 1, 2), (1, 0, 0), (0, 0, 0), (1, 1, 2), (0, 1, 2)),
                Piece("kernel", (4, 1, 2), (0, 0, 0), (1, 0, 0), (1, 1, 2), (0, 1, 2)),
            ],
        ),
        (
            lambda tensors: tensors["gate"][:2].view(1, 6),  # rows beside each other are no row of the tensor
            (1, 6),
            [
                Piece("gate", (4, 3), (0, 0), (0, 0), (1, 3), (0, 1)),
                Piece("gate", (4, 3), (1, 0), (0, 3), (1, 3), (0, 1)),
            ],
        ),
    ],
)
def test_a_function_that_moves_elements_is_told_by_its_boxes(
    function: Function, shape: tuple[int, ...], pieces: list[Piece]
) -> None:
    traced = trace(function, SHAPES, shape, device=CPU)
    assert (list(traced.pieces), traced.less) == (pieces, False)


def test_a_norm_centered_at_0_is_told_apart() -> None:
    traced = trace(lambda tensors: tensors["norm"] - 1, SHAPES, (4,), device=CPU)
    assert (list(traced.pieces), traced.less) == ([Piece("norm", (4,), (0,), (0,), (4,), (0,))], True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda tensors: tensors["norm"] * 2, "it computes new values"),
        (lambda tensors: -tensors["norm"], "it computes new values"),
        (lambda tensors: tensors["norm"] + tensors["norm"].flip(0), "it computes new values"),
        (lambda tensors: tensors["norm"].exp(), "it computes new values"),
        (lambda tensors: torch.ones(4, dtype=torch.float64), "it computes new values"),
        (lambda tensors: tensors["norm"].bfloat16(), "it returns values of type torch.bfloat16, wanted those that it"),
        (lambda tensors: tensors["gate"], "it returns a tensor of shape [4, 3], wanted [4]"),
        (lambda tensors: tensors["row"][0, :1].expand(4), "it repeats values"),
    ],
)
def test_one_that_does_more_is_refused_with_the_reason(function: Any, reason: str) -> None:
    with pytest.raises(ModelError) as raised:
        trace(function, SHAPES, (4,), device=CPU)
    assert raised.value.message.startswith(reason)


def test_rows_that_move_in_different_ways_are_refused() -> None:
    def turned(tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([tensors["gate"][0], tensors["gate"][1].flip(0)])

    with pytest.raises(ModelError, match="it is not made of boxes"):
        trace(turned, SHAPES, (2, 3), device=CPU)
    rows: Function = lambda tensors: tensors["norm"].view(2, 2).t().reshape(4)  # noqa: E731
    assert len(trace(rows, SHAPES, (4,), device=CPU).pieces) == 4
    with pytest.raises(ModelError, match="it cuts a parameter into more than 4096 boxes"):
        trace(lambda tensors: tensors["long"].flip(0), {"long": (5000,)}, (5000,), device=CPU)
