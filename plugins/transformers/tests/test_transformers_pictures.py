"""Responses to prompts with pictures have the log-probs of transformers' own forward over prompt and response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText

from corerl.config import LoraConfig, ModelConfig
from corerl.engines import GenerateRequest, Generation, SamplingParams, append, continued
from corerl.errors import EngineFailed
from corerl.ops import hash_keys
from corerl.pictures import Picture
from corerl.types import all_shown, offsets_of
from corerl.weights import bit_sums
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import TransformersConfig
from tests.engines.models import context, drawn_adapters, pause_after, update
from tests.pictured import apart
from tests.pictures import FAMILIES, of_pictures, pictures_config

vision = pytest.importorskip("corerl_vision.processor")
PLACEHOLDER, BREAK = 5, 9
PARAMS = SamplingParams(temperature=0.8, max_tokens=6, stop_tokens=(2, PLACEHOLDER))
SHOWN = ([0], [1], [], [1, 0], [0], [])  # the pictures of each row


@frozen(eq=False)
class Trial:
    """A model by transformers, an engine that has its weights, and a request with pictures."""

    model: Any
    tensors: dict[str, torch.Tensor]
    served: TransformersEngine
    config: ModelConfig
    inputs: Any
    asked: GenerateRequest


def random_tensors(model: Any, directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """The model's tensors, which are wide enough that its log-probs depend on every part, as its files have them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(0.25 * noise if param.dim() > 1 else param + 0.1 * noise)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def request_of(config: ModelConfig, inputs: Any, shown: Sequence[Sequence[int]] = SHOWN) -> GenerateRequest:
    """Rows of different lengths that show these pictures, of which there are two sizes, with tokens around them."""
    rng = np.random.default_rng(0)
    processor = vision.processor_of(config)
    pictures = [
        Picture(processor.seen(rng.integers(256, size=size).astype(np.uint8))) for size in ((40, 56, 3), (64, 32, 3))
    ]
    rows = []
    for own in shown:
        tokens = rng.integers(10, 60, size=rng.integers(1, 5)).tolist()
        column = [0] * len(tokens)
        for place, number in enumerate(own, start=1):
            height, width = processor.features(*pictures[number].pixels.shape[:2])
            span, after = ([inputs.placeholder] * width + [BREAK]) * height, rng.integers(10, 60, size=2).tolist()
            tokens += span + after
            column += [place] * len(span) + [0] * len(after)
        rows.append((tokens, (np.array(column, np.int32), [pictures[number] for number in own])))
    column, each_once = all_shown([part for _, part in rows])
    count = np.arange(len(rows))
    return GenerateRequest(
        tokens=np.array([token for tokens, _ in rows for token in tokens]),
        offsets=offsets_of([len(tokens) for tokens, _ in rows]),
        noise_keys=hash_keys(0, 0, count, np.zeros_like(count)),
        params=PARAMS,
        picture=column,
        pictures=each_once,
    )


def trial(family: str, tmp_path: Path, *, batch_size: int = 512) -> Trial:
    given = pictures_config(family)
    given.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    config = ModelConfig(config=fields, pictures="vision", tower="trained")
    model = AutoModelForImageTextToText.from_config(given, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = random_tensors(model, tmp_path, seed=0)
    served = TransformersEngine(config, TransformersConfig(batch_size=batch_size), context())
    (received,) = update([served], tensors, version=3, path=tmp_path / "weights")
    assert received.error == ""
    inputs = vision.VisionInputs(config)
    return Trial(model, tensors, served, config, inputs, request_of(config, inputs))


def assert_logprobs_of(made: Trial, generation: Generation) -> None:
    """Those of the model's own forward of each row, without padding or a cache."""
    assert max(each.max() for each in apart(made.model, made.inputs, made.asked, generation)) < 1e-4


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "gemma4"])
def test_logprobs_equal_transformers_forward_of_each_row(family: str, tmp_path: Path) -> None:
    made = trial(family, tmp_path)
    generation = made.served.generate(made.asked)
    assert len(set(np.diff(made.asked.offsets).tolist())) > 3 and not generation.unfinished.any()
    assert_logprobs_of(made, generation)
    assert made.served.weight_sums("float32") == bit_sums(made.tensors)
    # Another picture, and another tower, would have other log-probs.
    other = evolve(made.asked, pictures=tuple(Picture(255 - each.pixels) for each in made.asked.pictures))
    assert changed_by(generation, made.served.generate(other)) > 0.01
    moved = {name: -each if of_pictures(name) else each for name, each in made.tensors.items()}
    update([made.served], moved, version=4, path=tmp_path / "moved")
    assert changed_by(generation, made.served.generate(made.asked)) > 0.01


def changed_by(a: Generation, b: Generation) -> float:
    """How far the log-probs of the first row's first token lie apart, of the same noise; the row shows a picture."""
    return abs(float(a.logprobs[0] - b.logprobs[0]))


def test_each_picture_of_a_request_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trial("qwen3_vl", tmp_path, batch_size=2)
    tower: Any = made.served._tower
    whole = trial("qwen3_vl", tmp_path / "whole").served.generate(made.asked)
    calls, own = [], type(tower.decoder).get_image_features

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(named)
        return own(*arguments, **named)

    monkeypatch.setattr(type(tower.decoder), "get_image_features", counted)
    generation = made.served.generate(made.asked)
    assert tower.encoded == 2 and len(calls) == 1 and np.diff(generation.offsets).max() > 1
    assert generation.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(generation.logprobs, whole.logprobs, atol=1e-5, rtol=0)
    monkeypatch.setattr("corerl_vision.tower.PIXELS", 1)  # each picture alone
    np.testing.assert_allclose(made.served.generate(made.asked).logprobs, generation.logprobs, atol=1e-5, rtol=0)
    assert tower.encoded == 4 and len(calls) == 3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "gemma3"])
def test_a_paused_request_continues_with_its_pictures(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trial(family, tmp_path)
    whole = made.served.generate(made.asked)
    with monkeypatch.context() as patched:
        pause_after(patched, 3)  # the first row, or all, have two tokens
        first = made.served.generate(made.asked)
    assert first.unfinished.any() and len(first.tokens) > 0
    follows = continued(made.asked, first)
    assert follows.picture.any() and follows.response_lengths.any()
    joined = append(made.asked, first, made.served.generate(follows))
    assert joined.tokens.tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, atol=1e-4, rtol=0)
    assert_logprobs_of(made, joined)


def test_a_prompt_that_ends_with_a_picture_is_refused(tmp_path: Path) -> None:
    made = trial("qwen3_vl", tmp_path)
    asked = made.asked
    end = int(np.flatnonzero(asked.tokens[: asked.offsets[1]] == PLACEHOLDER)[-1]) + 1
    cut = asked.row_range(0, 1)
    cut = evolve(cut, tokens=cut.tokens[:end], picture=cut.picture[:end], offsets=np.array([0, end]))
    with pytest.raises(EngineFailed, match="a prompt ends with a picture, after which .* put a text behind it"):
        made.served.generate(cut)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_text_alone_equals_the_text_only_model(family: str, tmp_path: Path) -> None:
    made = trial(family, tmp_path)
    served = TransformersEngine(ModelConfig(path=str(tmp_path)), TransformersConfig(), context())
    text = {name: each for name, each in made.tensors.items() if not of_pictures(name)}
    (received,) = update([served], text, version=3, path=tmp_path / "text")
    assert received.error == ""
    made.served.generate(made.asked)  # leaves nothing behind
    rows = np.flatnonzero(np.diff(made.asked.offsets) < 5)
    asked = made.asked.take_rows(rows)
    assert len(rows) == 2 and not asked.pictures
    ours, theirs = made.served.generate(asked), served.generate(asked)
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.logprobs.tolist() == theirs.logprobs.tolist()


def test_a_tower_sleeps_and_wakes_with_the_decoder(tmp_path: Path) -> None:
    made = trial("internvl", tmp_path)
    before = made.served.generate(made.asked)
    tower = made.served._tower
    assert tower is not None and not any(each.numel() for each in tree_leaves(tower._forms))
    size = sum(each.numel() * 4 for each in made.tensors.values())
    assert made.served.sleep() == size and made.served.wake_up() == size
    missing = {name: each for name, each in made.tensors.items() if "multi_modal_projector" not in name}
    (received,) = update([made.served], missing, version=4, path=tmp_path / "missing")
    assert "multi_modal_projector" in received.error
    (received,) = update([made.served], made.tensors, version=5, path=tmp_path / "all")
    assert received.error == ""
    assert made.served.generate(made.asked).logprobs.tolist() == before.logprobs.tolist()


def test_adapters_of_the_decoder_sample_as_merged_weights_do(tmp_path: Path) -> None:
    made, lora = trial("qwen3_vl", tmp_path), LoraConfig(rank=3, alpha=7.0).settled({})
    served = TransformersEngine(made.config, TransformersConfig(), evolve(context(), lora=lora))
    adapters, merged = drawn_adapters(made.config, lora, made.tensors, scale=7 / 3, seed=0)  # of the text decoder
    (received,) = update([served], made.tensors | adapters, version=1, path=tmp_path / "adapters")
    assert received.error == ""
    found = served.generate(made.asked)
    assert changed_by(found, made.served.generate(made.asked)) > 0.01
    (received,) = update([made.served], merged, version=4, path=tmp_path / "merged")
    wanted = made.served.generate(made.asked)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
