from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from corerl.errors import ModelError
from corerl.models.attention import PACKED, register_packed_attention
from corerl.ops.attention import PackedSequences

Load = Callable[[Path, str], PreTrainedModel]


def test_hidden_states_of_packed_sequences_are_those_of_each_alone(tiny_model: Path, load: Load) -> None:
    model = load(tiny_model, PACKED).get_decoder()
    plain = load(tiny_model, "eager").get_decoder()
    lengths = [9, 1, 30, 7]
    tokens = torch.randint(3, 97, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    packing = PackedSequences.of(torch.tensor([0, 9, 10, 40, 47]), "cpu")
    with torch.no_grad():
        packed = model(tokens[None], position_ids=positions[None], use_cache=False, packing=packing)
        alone = [plain(part[None], use_cache=False).last_hidden_state[0] for part in tokens.split(lengths)]
    torch.testing.assert_close(packed.last_hidden_state[0], torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_forward_without_packing_fails_instead_of_mixing_sequences(tiny_models: dict[str, Path], load: Load) -> None:
    model = load(tiny_models["qwen3"], PACKED)
    with pytest.raises(ModelError, match="Qwen3Attention calls its attention without the bounds"):
        model(torch.ones(1, 4, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sliding_window": 128}, "uses sliding_window"),
        ({"softcap": 30.0, "dropout": 0.1}, "uses softcap, dropout"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(options: dict[str, float], expected: str) -> None:
    register_packed_attention()
    register_packed_attention()
    q = torch.zeros(1, 2, 3, 8)
    packing = PackedSequences.of(torch.tensor([0, 3]), "cpu")
    attention = ALL_ATTENTION_FUNCTIONS[PACKED]
    assert attention(nn.Identity(), q, q, q, None, packing=packing)[0].shape == (1, 3, 2, 8)
    with pytest.raises(ModelError, match=expected):
        attention(nn.Identity(), q, q, q, None, packing=packing, **options)
    with pytest.raises(ModelError, match="one row of packed tokens and no cache"):
        attention(nn.Identity(), q, torch.zeros(1, 2, 5, 8), q, None, packing=packing)
