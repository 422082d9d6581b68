from __future__ import annotations

import pytest
import torch

from corerl.errors import ModelError
from corerl.models.layouts import make_policy
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model
from corerl_testing.pool import RankPool
from tests.models import passes


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])  # whose head is a matrix, and more than that
def test_padding_of_the_vocabulary_has_no_probability(model_type: str) -> None:
    plain = drawn_model(smallest_config(model_type, vocab_size=130, tie_word_embeddings=False))
    policy, sequences = passes.policy_of(plain, "auto", vocabulary=97), passes.drawn(*passes.LENGTHS)
    got, wanted = passes.passed(policy, sequences), passes.by_the_book(plain, sequences, vocabulary=97)
    passes.assert_same(policy, got, dict(plain.named_parameters()), wanted)
    assert not policy.model.get_output_embeddings().weight.grad[97:].any()


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
