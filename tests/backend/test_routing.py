from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from numpy.typing import ArrayLike
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.backend.routing import COLUMN, free_tokens, replayed_experts
from corerl.errors import ModelError
from corerl.models.routing import Routers
from corerl.types import MicroBatch
from corerl_testing.models import tiny_fields
from tests.backend.test_batches import CPU, micro_batch

SIZES = {"layers": 2, "topk": 2, "experts": 8}
CURE = "replay what was recorded with the same model"


def micro_of(column: ArrayLike) -> MicroBatch:
    """Sequences of 3 and 1 tokens, each padded to a multiple of 2: T = 6, of which tokens 3 and 5 are padding."""
    micro = micro_batch([0, 1], [3, 1], multiple=2)
    return evolve(micro, columns={COLUMN: np.array(column, dtype=np.int16)})


def column(**others: Any) -> list[list[list[int]]]:
    """[T, layers, k], of all tokens 1 and 7 in the first layer, 2 and 0 in the second."""
    return [others.get(f"token_{token}", [[1, 7], [2, 0]]) for token in range(6)]


def test_tokens_choose_for_themselves_in_padding_and_where_an_expert_is_unknown() -> None:
    micro = micro_of(column(token_1=[[-1, -1], [2, 0]], token_2=[[1, 7], [3, -1]]))
    free = free_tokens(micro, **SIZES)
    assert free is not None
    assert free.tolist() == [[False] * 2, [True, False], [False, True], [True] * 2, [False] * 2, [True] * 2]


def test_where_all_tokens_are_told_none_is_free() -> None:
    unpadded = evolve(micro_batch([0, 1], [4, 2], multiple=1), columns={COLUMN: np.array(column(), dtype=np.int16)})
    assert free_tokens(unpadded, **SIZES) is None


@pytest.mark.parametrize(
    ("sizes", "others", "said"),
    [
        ({"layers": 3}, {}, "has shape [2, 2] per token, but the model has 3 layers with 2 experts per token"),
        ({"topk": 4}, {}, "has shape [2, 2] per token, but the model has 2 layers with 4 experts per token"),
        (
            {"experts": 7},
            {},
            "must have 2 different experts per token, numbered 0 to 6, or -1 where there is ",
        ),
        (
            {},
            {"token_4": [[3, 3], [2, 0]]},
            "must have 2 different experts per token, numbered 0 to 7, or -1 where there is ",
        ),
    ],
)
def test_a_column_of_another_model_is_refused(sizes: dict[str, int], others: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        free_tokens(micro_of(column(**others)), **{**SIZES, **sizes})
    assert f"column 'routed_experts' {said}" in caught.value.message and caught.value.message.endswith(CURE)


def test_routers_get_the_column_without_free_tokens() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_fields("qwen3-moe-deep")))
    routers = Routers(model)
    named = np.random.default_rng(0).permuted(np.tile(np.arange(8), (6, 4, 1)), axis=2)[..., :2]
    named[1, 2, 0] = -1
    told = replayed_experts(routers, micro_of(named), CPU)
    assert told is not None and told.dtype == torch.int16
    wanted = named.copy()
    wanted[1, 2] = wanted[3] = wanted[5] = -1
    assert told.tolist() == wanted.tolist()
    assert replayed_experts(routers, micro_batch([0], [3], multiple=1), CPU) is None


def test_a_model_whose_routers_are_not_known_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_fields("qwen3-moe-deep")))
    for each in (model, model.get_decoder()):
        each._can_record_outputs = {}  # transformers does not name them
    with pytest.raises(
        ModelError, match=r"^Qwen3MoeForCausalLM does not report the experts it chooses; .*set algorithm\.routing"
    ):
        replayed_experts(Routers(model), micro_of(column()), CPU)
