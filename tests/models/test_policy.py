from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.models.attention import PACKED
from corerl.models.build import build_on_meta, materialize
from corerl.models.layouts import PackedPolicy, make_policy
from corerl.ops.packing import PackedSequences
from corerl.types import Output
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model, tiny_config
from corerl_testing.pool import RankPool
from tests.models import passes

LENGTHS = [12, 5, 1, 12, 31]
TEMPERATURE = 0.7


def batch() -> tuple[torch.Tensor, PackedSequences, torch.Tensor]:
    tokens = torch.randint(3, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    return tokens, PackedSequences.of(bounds, "cpu"), positions


def reference(
    model: PreTrainedModel, tokens: torch.Tensor, *, vocabulary: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence on its own through transformers' whole model, then softmax by the book."""
    logprobs, entropy = [], []
    for part in tokens.split(LENGTHS):
        log_p = (model(part[None], use_cache=False).logits[0, :-1, :vocabulary] / TEMPERATURE).log_softmax(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, log_p.gather(-1, part[1:, None]).squeeze(-1)]))
        entropy.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropy)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])  # whose head is a matrix, and more than that
def test_padding_of_the_vocabulary_has_no_probability(model_type: str) -> None:
    tokens, packing, positions = batch()
    config = smallest_config(model_type, vocab_size=130, tie_word_embeddings=False)
    plain = drawn_model(config)
    policy = make_policy(config, dtype=torch.float32, vocabulary=97)
    materialize(policy.model, {name: nn.Parameter(param.detach()) for name, param in plain.named_parameters()})
    got = policy.eval()(tokens, packing, positions, TEMPERATURE, (Output.LOGPROBS, Output.ENTROPY))
    logprobs, entropy = reference(plain, tokens, vocabulary=97)
    torch.testing.assert_close(got[Output.LOGPROBS], logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(got[Output.ENTROPY], entropy, rtol=0, atol=1e-5)
    (got[Output.LOGPROBS].sum() + got[Output.ENTROPY].sum()).backward()
    (logprobs.sum() + entropy.sum()).backward()
    found, wanted = (model.get_output_embeddings().weight.grad for model in (policy.model, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert not found[97:].any()


def test_values_are_refused() -> None:
    policy = PackedPolicy(build_on_meta(tiny_config("qwen3"), dtype=torch.float32, attention=PACKED))
    tokens, packing, positions = batch()
    with pytest.raises(ModelError, match="a policy cannot compute values"):
        policy(tokens, packing, positions, 1.0, (Output.VALUES,))


@pytest.mark.parametrize("layout", ["packed", "whole"])
def test_ranks_that_share_the_head_compute_as_one(rank_pool: RankPool, layout: str) -> None:
    outputs, gradients = passes.pass_alone("llama", layout)
    ranks = rank_pool.run(passes.pass_with_the_group, "llama", layout)
    for found, of_rank in ranks:
        for output, values in outputs.items():
            torch.testing.assert_close(found[output], values, rtol=1e-5, atol=1e-5)
        for name in gradients.keys() - {"lm_head.weight"}:
            torch.testing.assert_close(of_rank[name], gradients[name], rtol=1e-4, atol=1e-5)
    head = torch.cat([of_rank["lm_head.weight"] for _, of_rank in ranks])
    wanted = gradients["lm_head.weight"]
    torch.testing.assert_close(head[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)
    assert (len(head), len(wanted)) == (98, 97) and not head[97:].any()


def test_a_head_beyond_a_matrix_is_not_shared() -> None:
    config = smallest_config("cohere")  # which scales its logits
    with pytest.raises(
        ModelError, match="^CohereForCausalLM has more after its decoder than one matrix, so that ranks"
    ):
        make_policy(config, dtype=torch.float32, group=object())  # type: ignore[arg-type]  # it is not asked
    assert make_policy(config, dtype=torch.float32).group is None
