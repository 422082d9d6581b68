"""What a rank of the server sets before it builds a model, of a package `sglang` with the modules that it changes."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corerl_sglang.arguments import VOCABULARY
from corerl_sglang.launch import STATIC_SPLITS, prepare_rank
from corerl_testing import smallest_config


class Rank:
    """This process as one, with the arguments that its server has."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.patch = directory, patch
        patch.setenv(STATIC_SPLITS, "")  # to be as it was afterwards
        patch.delenv(STATIC_SPLITS)

    def prepared(self, model_type: str, modules: dict[str, type] | None = None, **arguments: Any) -> None:
        """`modules`: each with its class."""
        for name, kind in (modules or {}).items():
            self.patch.setitem(sys.modules, f"sglang.srt.{name}", SimpleNamespace(**{kind.__name__: kind}))
        config, file = smallest_config(model_type).to_dict(), self.directory / "arguments.json"
        (self.directory / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        file.write_text(json.dumps({"model_path": str(self.directory), **arguments}))
        self.patch.setattr(sys, "argv", ["", str(file)])
        prepare_rank()


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("model_type", "own", "split"),
    [("qwen3", {}, "true"), ("deepseek_v3", {}, None), ("qwen3", {STATIC_SPLITS: "0"}, "0")],
)
def test_keys_are_split_unless_latent_or_the_user_says(rank: Rank, model_type: str, own: Any, split: Any) -> None:
    for name, value in own.items():
        rank.patch.setenv(name, value)
    rank.prepared(model_type)
    assert os.environ.get(STATIC_SPLITS) == split


@pytest.mark.parametrize(("dtype", "used"), [("float32", "torch's own"), ("bfloat16", "a kernel")])
def test_float32_ranks_use_torchs_operations(rank: Rank, dtype: str, used: str) -> None:
    own = {"forward_cuda": lambda self: "a kernel", "forward_native": lambda self: "torch's own"}
    places = {"activation": "SiluAndMul", "layernorm": "RMSNorm", "rotary_embedding.base": "RotaryEmbedding"}
    modules = {f"layers.{name}": type(kind, (), dict(own)) for name, kind in places.items()}
    rank.prepared("qwen3", modules, dtype=dtype)
    assert [kind().forward_cuda() for kind in modules.values()] == [used] * 3


@pytest.mark.parametrize("scores", [True, False])  # SGLang 0.5.15 does not score prompts
@pytest.mark.parametrize(("given", "seen"), [({}, [0.5, 2.0, 7.0]), ({VOCABULARY: 2}, [0.5, 2.0, -math.inf])])
def test_ranks_sample_and_score_only_ids_of_the_vocabulary(
    rank: Rank, given: dict[str, int], seen: list[float], scores: bool
) -> None:
    class Sampler:
        def forward(self, logits_output: Any, sampling_info: None) -> Any:
            return logits_output.next_token_logits[0].tolist()

    class InputLogprobProcessor:
        def forward(self, states: torch.Tensor, get_logits_fn: Any) -> Any:
            return get_logits_fn(states, use_logits_buffer=True)[0].tolist()

    scoring: dict[str, type] = {"layers.logprob_processor": InputLogprobProcessor} if scores else {}
    rank.prepared("qwen3", {"layers.sampler": Sampler, **scoring}, **given)
    logits = torch.tensor([[0.5, 2.0, 7.0]])
    assert Sampler().forward(SimpleNamespace(next_token_logits=logits.clone()), None) == seen
    if scores:
        scored = InputLogprobProcessor().forward(states=logits, get_logits_fn=lambda x, use_logits_buffer: x)
        assert scored == seen


@pytest.mark.parametrize(("model_type", "seen"), [("gemma3", [0, 2, 0]), ("qwen3", [None, 2, None])])
def test_a_batch_of_gemma_has_rows_without_pictures(rank: Rank, model_type: str, seen: list[int | None]) -> None:
    class Gemma3ForConditionalGeneration:
        def prepare_attn_masks(self, forward_batch: Any, input_ids: list[int], mask_dtype: type) -> None:
            self.seen = [each and len(each.mm_items) for each in forward_batch.mm_inputs]

    rank.prepared(model_type, {"models.gemma3_mm": Gemma3ForConditionalGeneration}, enable_multimodal=True)
    model, own = Gemma3ForConditionalGeneration(), [None, SimpleNamespace(mm_items=[1, 2]), None]
    batch = SimpleNamespace(mm_inputs=own)
    model.prepare_attn_masks(batch, [5], mask_dtype=bool)
    assert model.seen == seen and batch.mm_inputs is own
