"""The balancing loss and the load of experts, against transformers' own loss and counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from numpy.typing import ArrayLike
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from corerl.backend.experts import (
    COLUMN,
    ExpertLoad,
    free_tokens,
    load_balancing_loss,
    metrics_of_load,
    replayed_experts,
)
from corerl.errors import ModelError
from corerl.models.routing import Routers
from corerl.types import MicroBatch
from corerl_testing import smallest_config
from corerl_testing.models import tiny_fields
from tests.backend.test_batches import CPU, micro_batch


@pytest.mark.parametrize("topk", [1, 3])
def test_the_balancing_loss_is_that_of_transformers(topk: int) -> None:
    torch.manual_seed(0)
    counts = torch.rand(23) < 0.7
    logits = [torch.randn(23, 7, requires_grad=True) for _ in range(3)]
    found = load_balancing_loss(logits, counts, topk=topk)
    wanted = load_balancing_loss_func(tuple(logits), 7, topk, counts[None].long())
    torch.testing.assert_close(found, wanted)
    for mine, other in zip(torch.autograd.grad(found, logits), torch.autograd.grad(wanted, logits), strict=True):
        torch.testing.assert_close(mine, other)
        assert mine[~counts].abs().sum() == 0 < mine.abs().sum()


def test_an_even_load_costs_as_many_as_experts_are_chosen() -> None:
    even = torch.eye(6).add(torch.eye(6).roll(1, 0)) * 40  # each token has two likely experts, each expert two tokens
    assert load_balancing_loss([even], torch.ones(6, dtype=torch.bool), topk=2).item() == pytest.approx(2.0)


def test_a_single_expert_has_a_load_without_entropy() -> None:
    found = metrics_of_load(torch.tensor([[4], [4]]))
    assert (found["moe/entropy"].value, found["moe/largest_fraction"].value) == (0.0, 1.0)


FAMILIES = [
    "qwen2_moe",
    "mixtral",
    "gpt_oss",
    "ernie4_5_moe",
    "granitemoe",
    "phimoe",
    "qwen3_5_moe_text",
    "minimax_m2",
    "dbrx",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_that_transformers_balances(family: str) -> None:
    model = AutoModelForCausalLM.from_config(smallest_config(family)).eval()
    routers, tokens = Routers(model), torch.arange(3, 14)[None]
    with routers.replaying(None, record=True):
        wanted = model(input_ids=tokens, output_router_logits=True, use_cache=False).aux_loss
        routed = routers.take(logits=True)
    found = load_balancing_loss(routed.logits, torch.ones(11, dtype=torch.bool), topk=routers.topk)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_the_load_counts_the_experts_that_were_chosen(family: str) -> None:
    """Those of DeepSeek's routers are chosen in the last of several top-k, the first of which are of groups."""
    routers = Routers(model := AutoModelForCausalLM.from_config(smallest_config(family)).eval())
    tokens, heard = torch.arange(3, 14)[None], []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_hook(lambda module, arguments, output: heard.append(arguments[1]))
    micro = evolve(micro_batch([0, -1], [7, 4], multiple=1), columns={})
    with routers.replaying(None, record=True):
        model(input_ids=tokens, use_cache=False)
        load = ExpertLoad(routers=routers, coef=0.0, step_tokens=0)
        assert load.add(micro) is None
    shares = [torch.bincount(index[:7].flatten(), minlength=routers.experts) / (7 * routers.topk) for index in heard]
    found = load.metrics()
    assert found["moe/largest_fraction_max"].value == pytest.approx(max(share.max().item() for share in shares))
    assert found["moe/unused"].value == sum(int((share == 0).sum()) for share in shares) / routers.layers
    assert "moe/aux_loss" not in found


SIZES = {"layers": 2, "topk": 2, "experts": 8}
CURE = "replay what was recorded with the same model"


def micro_of(column: ArrayLike) -> MicroBatch:
    """Sequences of 3 and 1 tokens, each padded to a multiple of 2: T = 6, of which tokens 3 and 5 are padding."""
    micro = micro_batch([0, 1], [3, 1], multiple=2)
    return evolve(micro, columns={COLUMN: np.array(column, dtype=np.int16)})


def column(**others: Any) -> list[list[list[int]]]:
    """[T, layers, k], of all tokens 1 and 7 in the first layer, 2 and 0 in the second."""
    return [others.get(f"token_{token}", [[1, 7], [2, 0]]) for token in range(6)]


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
