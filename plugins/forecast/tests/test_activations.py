"""What passes take is counted without running them; here they run, or are counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig

from corerl.models import make_policy, materialize
from corerl.ops import PackedSequences
from corerl.types import Output
from corerl_forecast.activations import activations_of
from corerl_testing import tiny_fields

LOGPROBS = (Output.LOGPROBS,)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 97, "num_hidden_layers": 2}


def of(fields: dict[str, Any], tokens: int = 512, longest: int = 128, **more: Any) -> Any:
    options = {"precision": "bfloat16", "outputs": LOGPROBS, **more}
    return activations_of(AutoConfig.for_model(**fields), tokens=tokens, longest=longest, **options)


def test_layers_keep_as_many_bytes_as_autograd_saves() -> None:
    # Without attention's own memory, which is another on a CPU: one token a sequence, and many of them.
    fields = {**tiny_fields("qwen3"), **WIDE}
    policy = make_policy(AutoConfig.for_model(**fields), dtype=torch.float32)
    materialize(
        policy.model,
        {
            name: torch.nn.Parameter(torch.zeros_like(param, device="cpu"))
            for name, param in policy.model.named_parameters()
        },
    )
    own = {param.untyped_storage().data_ptr() for param in policy.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            saved[place] = tensor
        return tensor

    bounds = np.arange(0, 513, 2)
    tokens = torch.zeros(512, dtype=torch.int64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(tokens, PackedSequences.of(bounds, "cpu"), torch.arange(512) % 2, 1.0, LOGPROBS)
    wanted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    found = of(fields, tokens=512, longest=2, precision="float32").kept
    assert found == pytest.approx(wanted, rel=0.1)


def test_activations_grow_with_tokens_and_vocabulary() -> None:
    fields = {**tiny_fields("qwen3"), **WIDE}
    one, two = of(fields, tokens=2048), of(fields, tokens=4096)
    assert two.kept == pytest.approx(2 * one.kept, rel=0.01)
    larger = of({**fields, "vocab_size": 9700}, tokens=2048)
    assert larger.kept == pytest.approx(one.kept, rel=0.02)
    more = (9700 - 97) * (2048 * 2 + 256 * 4)  # all logits in 16 bits, and the head's gradient in float32
    assert larger.train - one.train == pytest.approx(more, rel=0.1)


def test_recomputed_layers_keep_their_inputs_alone() -> None:
    fields = {**tiny_fields("qwen3"), **WIDE, "num_hidden_layers": 6}
    found, fewer = (of({**fields, "num_hidden_layers": layers}, recompute=True).kept for layers in (6, 2))
    assert found - fewer == pytest.approx(4 * 512 * 256 * 2, rel=0.01)  # [T, H] of four layers in 16 bits


def test_rows_of_whole_models_are_recomputed_too() -> None:
    fields = {**tiny_fields("qwen3"), **WIDE, "num_hidden_layers": 6}
    packed, whole, kept = (
        of(fields, recompute=recompute, layout=layout)
        for layout, recompute in (("packed", True), ("whole", True), ("whole", False))
    )
    assert whole.kept == pytest.approx(packed.kept, rel=0.1)
    assert whole.train < 0.7 * kept.train


def test_compiled_layers_keep_no_copies_in_float32() -> None:
    fields = {**tiny_fields("qwen3"), **WIDE}
    plain, fused = of(fields), of(fields, fused=True)
    assert 0.5 * plain.kept < fused.kept < 0.8 * plain.kept
    assert plain.train - fused.train == plain.kept - fused.kept and plain.forward == fused.forward


def test_a_pass_without_gradients_takes_no_more_with_more_layers() -> None:
    fields = {**tiny_fields("qwen3"), **WIDE}
    few, many = (of({**fields, "num_hidden_layers": layers}) for layers in (2, 6))
    assert few.forward == many.forward < few.train < many.train


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_moe", "qwen3_5_text", "deepseek_v3", "granite"])
def test_every_kind_of_layer_can_be_counted(family: str) -> None:
    from corerl_testing import smallest_config

    config = smallest_config(family)
    found = activations_of(config, tokens=256, longest=64, precision="bfloat16", outputs=LOGPROBS)
    assert 0 < found.forward < found.train and 0 < found.kept < found.train


def test_full_rows_keep_as_much_as_packed_ones() -> None:
    fields = {**tiny_fields("qwen3"), **WIDE}
    packed = of(fields, longest=64)
    short, long = (of(fields, longest=longest, layout="whole") for longest in (64, 512))
    assert short.kept == pytest.approx(packed.kept, rel=0.1)
    assert long.kept == pytest.approx(short.kept, rel=0.05)  # scores would be eight times as many
