"""Routers of several families, against what each makes of the scores of the experts that it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from corerl.errors import ModelError
from corerl.models.routing import Routers, routers
from corerl_testing import smallest_config

EXPERTS, TOPK, TOKENS = 6, 2, torch.arange(11)[None]


def of_all(logits: Tensor, index: Tensor) -> Tensor:
    return logits.softmax(-1).gather(1, index)


def shares_of_all(logits: Tensor, index: Tensor) -> Tensor:
    scores = of_all(logits, index)
    return scores / scores.sum(-1, keepdim=True)


def among_themselves(logits: Tensor, index: Tensor) -> Tensor:
    return logits.gather(1, index).softmax(-1)


FAMILIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "qwen2_moe": of_all,
    "qwen3_moe": shares_of_all,
    "mixtral": shares_of_all,
    "olmoe": of_all,
    "gpt_oss": among_themselves,
}


def tiny(model_type: str, **fields: Any) -> PreTrainedModel:
    settings = {
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "norm_topk_prob": model_type == "qwen3_moe",
        "pad_token_id": 0,
    }
    known = AutoConfig.for_model(model_type).to_dict()
    config = AutoConfig.for_model(model_type, **{name: settings[name] for name in settings if name in known} | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def listened(model: PreTrainedModel) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A list that fills with the logits, scores and indices that each router gives."""
    heard: list[tuple[Tensor, Tensor, Tensor]] = []
    for router in routers(model):
        router.register_forward_hook(lambda router, arguments, output: heard.append(output))
    return heard


def others() -> Tensor:
    """[T, layers, k] different experts of each token, -1 for some."""
    told = torch.rand(TOKENS.shape[1], 3, EXPERTS, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :TOPK]
    told[2, 1] = told[7] = -1
    return told.to(torch.int16)


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_tell_what_they_choose_and_choose_again(family: str) -> None:
    model = tiny(family)
    with torch.no_grad():
        before = model(input_ids=TOKENS, use_cache=False).logits
        taken = Routers(model)
        heard = listened(model)
        with taken.replaying(None):
            assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)
            with pytest.raises(ModelError, match="does not report"):
                _ = taken.chosen
        with taken.replaying(None, keep=True):
            model(input_ids=TOKENS, use_cache=False)
            chosen = taken.chosen
        assert torch.equal(chosen, torch.stack([logits.topk(TOPK).indices for logits, _, _ in heard[-3:]], 1).short())
        with taken.replaying(chosen, keep=True):
            assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)
            assert torch.equal(taken.chosen, chosen)
        with taken.replaying(others()):
            assert not torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, before)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma4_text", {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2}),
        ("aria_text", {"moe_num_experts": EXPERTS, "moe_topk": 2}),
        ("hunyuan_v1_moe", {"num_experts": EXPERTS, "moe_topk": [2, 2]}),
    ],
)
def test_experts_per_token_are_known_by_each_familys_name(family: str, fields: dict[str, Any]) -> None:
    config = smallest_config(family)
    config.update({**fields, "num_hidden_layers": 2, "moe_intermediate_size": 16})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    taken = Routers(model)
    assert taken.topk == 2
    if not taken.layers:
        pytest.skip("this transformers does not say which modules are this family's routers")
    with torch.no_grad(), taken.replaying(None, keep=True):
        model(input_ids=TOKENS, use_cache=False)
        assert taken.chosen.shape == (TOKENS.shape[1], 2, 2)


def test_logits_of_routers_that_record_probabilities_are_their_logarithms() -> None:
    config = smallest_config("gemma4_text")
    moe = {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": 16}
    config.update(moe)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    taken = Routers(model)
    if not taken.layers:
        pytest.skip("this transformers does not say which modules are this family's routers")
    scores: list[Tensor] = []
    for router in routers(model):
        router.get_submodule("proj").register_forward_hook(lambda module, given, output: scores.append(output))
    with torch.no_grad(), taken.replaying(None, record=True):
        model(input_ids=TOKENS, use_cache=False)
        found = taken.take(logits=True).logits
    for logits, wanted in zip(found, scores, strict=True):
        torch.testing.assert_close(logits.softmax(-1), wanted.view_as(logits).softmax(-1))


GROUPS = {
    "n_routed_experts": EXPERTS,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("phimoe", {}),
        ("deepseek_v2", {**GROUPS, "topk_method": "group_limited_greedy"}),
        ("deepseek_v3", GROUPS),
        ("glm4_moe", {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    ],
)
def test_a_model_that_chooses_otherwise_is_not_replayed(family: str, fields: dict[str, Any]) -> None:
    model = tiny(family, **fields)
    taken = Routers(model)
    if not taken.layers:
        pytest.skip("this transformers does not say which modules are this family's routers")
    with torch.no_grad(), taken.replaying(None, keep=True):
        model(input_ids=TOKENS, use_cache=False)
        with pytest.raises(
            ModelError, match=r"LM does not report the experts it chooses; .* set algorithm\.routing_replay"
        ):
            _ = taken.chosen
    with (
        taken.replaying(others()),
        pytest.raises(ModelError, match="LM does not choose its experts with a single top-k; "),
    ):
        model(input_ids=TOKENS, use_cache=False)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", FAMILIES)
def test_layers_compile_as_one_graph_until_somebody_listens(model_type: str) -> None:
    depth = torch._dynamo.config.recompile_limit + 2  # what is compiled for each layer fails
    model = tiny(model_type, num_hidden_layers=depth)
    controlled, told = Routers(model), others().clamp_min(0)[:, :1].expand(-1, depth, -1)
    ways: list[tuple[Tensor | None, bool]] = [(None, False), (told, False), (None, True), (told, True), (None, False)]
    calls: list[int] = []

    def counted(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[-1] += 1
            return graph.forward(*args)

        return call

    def passes() -> list[Tensor]:
        found = []
        for experts, keep in ways:
            calls.append(0)
            with torch.no_grad(), controlled.replaying(experts, keep=keep):
                found.append(model(TOKENS, use_cache=False).logits)
        return found

    wanted = passes()
    torch._dynamo.reset()
    for layer in model.get_decoder().layers:
        layer.forward = torch.compile(layer.forward, backend=counted, dynamic=True)
    calls.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        torch.testing.assert_close(passes(), wanted)
    torch._dynamo.reset()
    assert not torch.allclose(wanted[0], wanted[1])
    assert calls[0] == depth and min(calls[1:]) > depth  # what goes around routers does for those who do not listen
