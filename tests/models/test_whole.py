"""Models as their authors wrote them, on padded rows: log-probs, entropy, values and gradients are those of
transformers' own forward of each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from corerl.errors import ModelError
from corerl.models.build import VALUE_HEAD, build_on_meta, materialize, recompute_layers
from corerl.models.whole import WholePolicy
from corerl.ops import attention
from corerl.ops.padding import Rectangles, rectangles
from corerl.types import Output
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model, tiny_config
from tests.models.passes import LENGTHS, assert_same, by_the_book, drawn, passed, policy_of

KINDS = [
    "qwen3",  # could be packed
    "gemma2",  # caps in attention and on logits, alternating windows
    "gpt_oss",  # sinks, windows, experts
    "llama4_text",  # chunks; is its own decoder by `get_decoder`
    "mamba",  # a state space
    "recurrent_gemma",
    "bloom",  # an attention of its own, which adds distances
    "roberta",  # layers between decoder and head, positions that do not begin with 0
]


@pytest.mark.parametrize("model_type", KINDS)
def test_a_models_own_code_on_padded_rows_gives_what_it_gives_each_sequence_alone(model_type: str) -> None:
    model = drawn_model(smallest_config(model_type))
    policy, sequences = policy_of(model, "whole"), drawn(*LENGTHS)
    got = passed(policy, sequences)
    assert_same(policy, got, dict(model.named_parameters()), by_the_book(model, sequences))


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2", "qwen3-moe"])
def test_whole_and_packed_are_the_same_where_both_can_be_had(kind: str) -> None:
    model = drawn_model(tiny_config(kind))
    rows, packed, sequences = policy_of(model, "whole"), policy_of(model, "packed"), drawn(*LENGTHS)
    others = dict(packed.model.named_parameters())
    assert_same(rows, passed(rows, sequences), others, passed(packed, sequences))


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_next", "mamba2"])
def test_no_sequence_changes_with_its_padding_or_with_the_others(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, (short, longer) = policy_of(drawn_model(smallest_config(model_type)), "whole"), drawn(9, 20)
    alone, together = (passed(policy, rows)[Output.LOGPROBS][:9] for rows in ([short], [short, longer]))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    other, *_ = drawn(20, seed=3)
    # Not to the last bit: where a tensor lies in memory decides how a CPU adds up its ends.
    torch.testing.assert_close(passed(policy, [short, other])[Output.LOGPROBS][:9], together, rtol=0, atol=1e-6)

    def padded_with_the_first_token(*args: Any, **kwargs: Any) -> Rectangles:
        rows = rectangles(*args, **kwargs)
        gather = rows.gather.copy()
        gather[[cell for cell in range(len(gather)) if cell not in rows.scatter]] = 0
        return evolve(rows, gather=gather)

    monkeypatch.setattr(attention, "rectangles", padded_with_the_first_token)
    torch.testing.assert_close(passed(policy, [short, longer])[Output.LOGPROBS][:9], together, rtol=0, atol=1e-6)


def test_recomputed_layers_change_no_bit() -> None:
    model = drawn_model(smallest_config("bert"))  # its layers are not the decoder's own ModuleList
    kept, recomputed = policy_of(model, "whole"), policy_of(model, "whole")
    recompute_layers(recomputed.model)
    for policy in (kept, recomputed):
        policy.train()
        passed(policy, drawn(*LENGTHS))[Output.LOGPROBS].sum().backward()
    for one, other in zip(kept.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_batch_of_single_tokens_gives_zeros_and_zero_gradients() -> None:
    policy = policy_of(drawn_model(smallest_config("gemma2")), "whole")
    got = passed(policy, drawn(1, 1, 1))[Output.LOGPROBS]
    got.sum().backward()
    assert torch.equal(got, torch.zeros(3))
    assert all(param.grad is not None and not param.grad.any() for param in policy.parameters())


# ---- experts, critics ------------------------------------------------------------------------------------------------


def test_experts_are_reported_and_replayed_token_by_token_whatever_the_padding() -> None:
    model = drawn_model(tiny_config("qwen3-moe"))
    rows, packed, sequences = policy_of(model, "whole"), policy_of(model, "packed"), drawn(*LENGTHS)
    chosen = []
    for policy in (rows, packed):
        with torch.no_grad(), policy.routers.replaying(None, keep=True):
            passed(policy, sequences)
            chosen.append(policy.routers.chosen)
    assert torch.equal(*chosen)
    others = (chosen[0].long() + 1) % 8
    others[::3] = -1  # where the router chooses
    found = []
    for policy in (rows, packed):
        with policy.routers.replaying(others):
            got = passed(policy, sequences, (Output.LOGPROBS,))[Output.LOGPROBS]
            got.sum().backward()
        found.append(got)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    for one, other in zip(rows.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-4)


def test_values_are_those_of_the_decoders_hidden_states_before_each_token() -> None:
    config = smallest_config("gemma2")
    built = build_on_meta(config, dtype=torch.float32, attention="eager", value_head=True)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: nn.Parameter(0.2 * torch.randn(p.shape, generator=generator)) for name, p in built.named_parameters()
    }
    policy = WholePolicy(built)
    materialize(built, params)
    sequences = drawn(*LENGTHS)
    got = passed(policy, sequences, (Output.VALUES,))[Output.VALUES]
    wanted = []
    for each in sequences:
        hidden = built.get_decoder()(input_ids=each[None], use_cache=False).last_hidden_state[0, :-1]
        wanted += [torch.zeros(1), built.get_submodule(VALUE_HEAD)(hidden)[:, 0]]
    torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-5)
    assert [id(each) for each in policy.head_parameters] == [id(params["value_head.weight"])]
    with pytest.raises(ModelError, match="a critic cannot compute entropy, logprobs"):
        passed(policy, sequences)
