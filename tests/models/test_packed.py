"""Packed sequences: log-probs, entropy and gradients are those of transformers' own forward of each sequence alone, and
no sequence sees another, through every kind of layer."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from corerl.models.files import look_at
from corerl.models.layout import choose_layout
from corerl.types import Output
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model
from tests.models.passes import LENGTHS, assert_same, by_the_book, drawn, passed, policy_of

# Their layers tell each other the bounds of sequences only in newer versions of transformers; in others they are whole.
NEWER = ("mamba2", "falcon_h1", "nemotron_h", "lfm2")
KINDS = [
    "gemma2",  # caps in attention and on logits, alternating windows
    "gemma3_text",  # another rotary base in windows
    "cohere2",  # a scale of logits; layers without positions
    "granite",  # scales everywhere
    "gpt_oss",  # sinks, windows, experts
    "mistral",  # a window in all layers
    "olmo3",
    "deepseek_v3",  # latent attention
    "minimax",  # lightning attention
    "mamba2",  # a state space
    "falcon_h1",  # attention beside a state space
    "nemotron_h",  # layers of either kind, and of neither
    "qwen3_5_text",  # gated delta net
    "lfm2",  # short convolutions
    "bert",  # layers between decoder and head
    "modernbert-decoder",  # takes its head for its decoder
]


def require_packed(model_type: str) -> None:
    if model_type in NEWER and Version(transformers.__version__) < Version("5.23"):
        chosen = choose_layout(look_at(smallest_config(model_type)), "auto")
        if "is called without the bounds of sequences" in chosen.why:
            pytest.skip(f"whole with transformers {transformers.__version__}")


@pytest.mark.parametrize("model_type", KINDS)
def test_packed_sequences_give_what_the_model_gives_each_alone(model_type: str) -> None:
    require_packed(model_type)
    model = drawn_model(smallest_config(model_type))
    policy, sequences = policy_of(model, "packed"), drawn(*LENGTHS)
    got = passed(policy, sequences)
    assert_same(policy, got, dict(model.named_parameters()), by_the_book(model, sequences))


@pytest.mark.parametrize("model_type", KINDS)
def test_no_sequence_sees_another(model_type: str) -> None:
    """Nor does it what is in the place of another: the log-probs' bits are the same."""
    require_packed(model_type)
    policy, (first, second, third) = policy_of(drawn_model(smallest_config(model_type)), "packed"), drawn(16, 16, 16)
    (other,) = drawn(16, seed=3)
    with torch.no_grad():
        got = passed(policy, [first, second, third])[Output.LOGPROBS].split(16)
        changed = passed(policy, [first, other, third])[Output.LOGPROBS].split(16)
    assert torch.equal(got[0], changed[0]) and torch.equal(got[2], changed[2])
    assert not torch.equal(got[1][1:], changed[1][1:])
