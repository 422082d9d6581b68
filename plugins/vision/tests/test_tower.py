"""Pictures in packed and in padded rows give what transformers' own forward gives of each sequence alone."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from corerl.config import ModelConfig
from corerl.errors import ModelError
from corerl.models import hf_config, make_policy, materialize, named_weights
from corerl.ops import PackedSequences
from corerl.pictures import Picture
from corerl.types import PICTURE, MicroBatch, Output
from corerl_vision.processor import VisionInputs, processor_of
from corerl_vision.tower import VisionTower
from tests.pictures import FAMILIES, pictures_config

CPU = torch.device("cpu")
SHOWN: tuple[list[int], ...] = ([0], [], [1, 0])  # the pictures of three sequences


def model_of(family: str, directory: Path) -> tuple[ModelConfig, Any]:
    """A tiny model of the family with random weights, as a config and by transformers."""
    config = pictures_config(family)
    config.save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text())
    torch.manual_seed(0)
    own = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # Gemma's projector begins with zeros, and would show nothing
        for param in own.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return ModelConfig(config=fields, pictures="vision", tower="trained"), own.eval()


def sequences(model: ModelConfig, family: str) -> tuple[list[Picture], list[tuple[list[int], list[int]]], Any]:
    """Two pictures; tokens and column of each sequence; and what makes the tower's inputs."""
    processor, inputs = processor_of(model), VisionInputs(model)
    rng = np.random.default_rng(0)
    pictures = [
        Picture(processor.seen(rng.integers(256, size=size).astype(np.uint8))) for size in ((40, 56, 3), (64, 32, 3))
    ]
    rows = []
    for shown in SHOWN:
        tokens, column = rng.integers(10, 60, size=3).tolist(), [0, 0, 0]
        for number in shown:
            count = int(np.prod(processor.features(*pictures[number].pixels.shape[:2])))
            tokens += [inputs.placeholder] * count + rng.integers(10, 60, size=2).tolist()
            column += [number + 1] * count + [0, 0]
        rows.append((tokens, column))
    return pictures, rows, inputs


def logprobs_alone(model: Any, tokens: list[int], column: list[int], inputs: Any, pictures: list[Picture]) -> Any:
    """[n - 1] of the tokens but the first, by transformers' forward."""
    given = {}
    if pictures:
        takes = inspect.signature(model.model.forward).parameters
        given = {name: torch.as_tensor(np.array(each)) for name, each in inputs.inputs(pictures).items()}
        kinds = (torch.tensor([column]) > 0).int()
        given |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in takes}
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False, **given).logits[0].float()
    return torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("layout", ["packed", "whole"])
@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "gemma4"])
def test_logprobs_of_mixed_rows_equal_each_sequence_alone(family: str, layout: str, tmp_path: Path) -> None:
    model, own = model_of(family, tmp_path)
    pictures, rows, inputs = sequences(model, family)
    if family == "gemma3" and layout == "packed":
        with pytest.raises(ModelError, match="lets the tokens of a picture see later ones"):
            make_policy(hf_config(model), dtype=torch.float32, layout=layout, pictures=inputs)
        return
    policy = make_policy(hf_config(model), dtype=torch.float32, layout=layout, pictures=inputs)
    weights = named_weights(own)
    assert isinstance(policy.tower, VisionTower)
    halves = (policy.model, policy.tower.module)
    for half in halves:
        materialize(half, {name: torch.nn.Parameter(weights[name].detach()) for name, _ in half.named_parameters()})
    assert sorted(name for half in halves for name, _ in half.named_parameters()) == sorted(
        dict(own.named_parameters())
    )
    tokens = np.concatenate([each for each, _ in rows])
    bounds = np.concatenate([[0], np.cumsum([len(each) for each, _ in rows])])
    positions = np.concatenate([np.arange(len(each)) for each, _ in rows])
    micro = MicroBatch(
        tokens=tokens,
        positions=positions,
        cu_seqlens=bounds,
        lengths=np.diff(bounds),
        rows=np.arange(3),
        columns={PICTURE: np.concatenate([column for _, column in rows]).astype(np.int32)},
    )
    features = policy.tower.encode(dict(enumerate(pictures, start=1)), CPU)
    seen = policy.tower.seen(micro, features, CPU)
    packing = PackedSequences.of(bounds, "cpu")
    found = policy(torch.tensor(tokens), packing, torch.tensor(positions), 1.0, [Output.LOGPROBS], seen)
    wanted = [
        torch.cat([torch.zeros(1), logprobs_alone(own, *row, inputs, [pictures[number] for number in shown])])
        for row, shown in zip(rows, SHOWN, strict=True)
    ]
    torch.testing.assert_close(found[Output.LOGPROBS], torch.cat(wanted), atol=1e-5, rtol=1e-5)
    turned = [Picture(pictures[number].pixels[::-1].copy()) for number in SHOWN[0]]
    assert (logprobs_alone(own, *rows[0], inputs, turned) - wanted[0][1:]).abs().max() > 1e-3  # it sees
    assert policy.tower.encoded == 2
    # Gradients reach decoder and tower alike.
    params = {name: param for half in halves for name, param in half.named_parameters()}
    ours = torch.autograd.grad(found[Output.LOGPROBS].sum(), list(params.values()), allow_unused=True)
    theirs = torch.autograd.grad(torch.cat(wanted).sum(), list(own.parameters()), allow_unused=True)
    by_name = {name: grad for (name, _), grad in zip(own.named_parameters(), theirs, strict=True)}
    for name, grad in zip(params, ours, strict=True):
        if grad is not None or by_name[name] is not None:
            largest = float(by_name[name].abs().max())
            torch.testing.assert_close(grad, by_name[name], atol=1e-5 * max(1.0, largest), rtol=1e-5)
