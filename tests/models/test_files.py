from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from corerl.config.schema import ModelConfig
from corerl.errors import ModelError
from corerl.models.build import build_on_meta
from corerl.models.config import hf_config
from corerl.models.files import (
    Constant,
    Initial,
    Normal,
    RandomSource,
    Uniform,
    initials,
    model_files,
    untied_head,
)
from corerl.models.names import hf_boxes
from corerl.models.readers import SINGLE
from corerl_doctor.advice import unused_names
from corerl_testing.models import KINDS, tiny_config, tiny_fields

Load = Callable[[Path, str], PreTrainedModel]
GPT2 = {"model_type": "gpt2", "vocab_size": 31, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
MODELS = {"gpt2": GPT2, **{kind: tiny_fields(kind) for kind in ("qwen3", "qwen3-tied", "qwen3-moe")}}


def written(directory: Path, fields: dict[str, Any], rename: Callable[[str], str] = lambda name: name) -> Path:
    """A model of `fields` with its tensors renamed."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(directory)
    change(directory, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    return directory


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(edit(load_file(directory / SINGLE)), directory / SINGLE, metadata={"format": "pt"})


def assert_loads_as_in_transformers(directory: Path, load: Load) -> PreTrainedModel:
    found = load(directory, "eager").state_dict()
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    wanted, told = from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and found.keys() == wanted.state_dict().keys()
    assert [name for name, tensor in wanted.state_dict().items() if not torch.equal(found[name], tensor)] == []
    assert unused(directory) == sorted(told["unexpected_keys"])
    return wanted


def unused(directory: Path) -> list[str]:
    return unused_names(str(directory), hf_config(ModelConfig(path=str(directory))))


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_names_with_and_without_the_prefix_are_those_of_transformers(
    kind: str, prefixed: bool, tmp_path: Path, load: Load
) -> None:
    prefix = "transformer." if kind == "gpt2" else "model."
    directory = written(tmp_path, MODELS[kind], lambda name: prefix * prefixed + name.removeprefix(prefix))
    assert any(name.startswith(prefix) for name in load_file(directory / SINGLE)) == prefixed
    assert_loads_as_in_transformers(directory, load)


def test_unknown_tensors_are_told_but_old_buffers(tmp_path: Path, load: Load) -> None:
    directory = written(tmp_path, GPT2)
    more = {"h.0.attn.bias": torch.ones(1, 1, 48, 48), "score.weight": torch.ones(2)}
    change(directory, lambda tensors: {**tensors, **more})
    assert_loads_as_in_transformers(directory, load)
    assert unused(directory) == ["score.weight"]


@pytest.mark.parametrize(
    ("kind", "embedding"), [("gpt2", "transformer.wte.weight"), ("qwen3-tied", "model.embed_tokens.weight")]
)
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_head_unlike_the_embedding_is_used(
    kind: str, embedding: str, prefixed: bool, tmp_path: Path, load: Load
) -> None:
    directory = written(tmp_path, {**MODELS[kind], "tie_word_embeddings": True})
    head = torch.randn_like(load_file(directory / SINGLE)[embedding])
    change(directory, lambda tensors: {**tensors, "lm_head.weight": head})
    if not prefixed:
        prefix = "transformer." if kind == "gpt2" else "model."
        change(directory, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    wanted = assert_loads_as_in_transformers(directory, load)
    assert torch.equal(wanted.get_output_embeddings().weight, head)
    config = hf_config(ModelConfig(path=str(directory)))
    assert not config.tie_word_embeddings and json.loads((directory / "config.json").read_text())["tie_word_embeddings"]


def test_a_head_that_differs_in_its_last_row_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corerl.models.files.COMPARED", 64 * 10)  # ten rows at a time of 97
    directory = written(tmp_path, MODELS["qwen3-tied"])
    config = AutoConfig.from_pretrained(directory)
    head = load_file(directory / SINGLE)["model.embed_tokens.weight"].clone()
    change(directory, lambda tensors: {**tensors, "lm_head.weight": head})
    assert untied_head(config, directory) == "" and unused(directory) == []
    assert model_files(directory, config).shape("model.embed_tokens.weight") == (97, 64)
    head[96, 63] += 1
    change(directory, lambda tensors: {**tensors, "lm_head.weight": head})
    assert untied_head(config, directory) == "lm_head.weight"
    with pytest.raises(ModelError, match="has a lm_head.weight of its own, but in this run's model it is the same as"):
        model_files(directory, config)  # as a snapshot of a model that is tied


@pytest.mark.parametrize("kind", ["gpt2", "qwen3-tied"])
def test_a_head_alone_gives_a_tied_embedding(kind: str, tmp_path: Path, load: Load) -> None:
    embeddings = ("transformer.wte.weight", "model.embed_tokens.weight")
    directory = written(
        tmp_path,
        {**MODELS[kind], "tie_word_embeddings": True},
        lambda name: "lm_head.weight" if name in embeddings else name,
    )
    assert_loads_as_in_transformers(directory, load)


SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    boxes = hf_boxes(build_on_meta(config, dtype=torch.float32, attention="eager"))
    return {box.name: box.shape for found in boxes.values() for box in found}


def drawn(config: PreTrainedConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    shapes = shapes_of(config)
    source = RandomSource(config, shapes, seed, initials=initials(config, seed=seed))
    return {name: source.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_usual_families_begin_as_usual(kind: str) -> None:
    config = tiny_config(kind)
    shapes = shapes_of(config)
    usual = RandomSource(config, shapes, seed=3)
    assert initials(config, seed=3).keys() == shapes.keys()
    for name, values in drawn(config).items():
        assert torch.equal(values, usual.read(name, (0,) * len(shapes[name]), shapes[name])), name


def test_a_state_space_model_begins_as_its_authors_say() -> None:
    mamba = AutoConfig.for_model("mamba2", **(SMALL | {"num_heads": 4}), head_dim=32, state_size=16, n_groups=2)
    found, values = initials(mamba, seed=0), drawn(mamba)
    assert torch.equal(values["backbone.layers.0.mixer.A_log"], torch.log(torch.arange(1.0, 5.0)))
    assert torch.equal(values["backbone.layers.0.mixer.D"], torch.ones(4))
    assert all(torch.equal(a, b) for a, b in zip(drawn(mamba).values(), values.values(), strict=True))
    convolution = found["backbone.layers.0.mixer.conv1d.weight"]
    bound = 1 / math.sqrt(4)  # He et al. 2015 with a = sqrt(5), for a width of 4: the square root of 1 / fan
    assert isinstance(convolution, Uniform) and convolution.high == pytest.approx(bound)
    assert convolution.low == -convolution.high
    assert float(values["backbone.layers.0.mixer.conv1d.weight"].abs().max()) < bound


@pytest.mark.parametrize(
    ("initial", "mean", "deviation", "furthest"),
    [
        (Normal(0.5, 0.1), 0.5, 0.1, math.inf),
        (Normal(0.0, 1.0, most=1.0), 0.0, 0.5396, 1.0),  # of a normal cut at one deviation, from its density there
        (Uniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12), 2.0),
        (Constant(7.0), 7.0, 0.0, 0.0),
    ],
)
def test_values_have_the_distribution_that_is_asked_for(
    initial: Initial, mean: float, deviation: float, furthest: float
) -> None:
    shape = (400, 500)
    source = RandomSource(tiny_config("qwen3"), {"w": shape}, 0, initials={"w": initial})
    values = source.read("w", (0, 0), shape)
    assert float(values.mean()) == pytest.approx(mean, abs=0.01)
    assert float(values.std()) == pytest.approx(deviation, abs=0.01)
    assert float((values - mean).abs().max()) <= furthest
    assert torch.equal(source.read("w", (30, 40), (5, 6)), values[30:35, 40:46])


def whole(source: RandomSource, name: str) -> torch.Tensor:
    shape = source.shape(name)
    assert shape is not None
    return source.read(name, (0,) * len(shape), shape)


def test_a_vector_of_unknown_purpose_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no initialization is known for 'layers.0.A_log' \[8\]"):
        RandomSource(tiny_config("qwen3"), {"layers.0.A_log": (8,)}, seed=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"w": (700, 1001), "norm.weight": (5,)}
    on_cpu, on_gpu = (RandomSource(tiny_config("qwen3"), shapes, 3, device) for device in ("cpu", "cuda"))
    for name in shapes:
        drawn = whole(on_gpu, name)
        assert drawn.is_cuda
        torch.testing.assert_close(drawn.cpu(), whole(on_cpu, name), rtol=1e-6, atol=0)
    full = whole(on_gpu, "w")
    monkeypatch.setattr("corerl.models.files.VALUES", {"cuda": 4000})
    assert torch.equal(on_gpu.read("w", (100, 7), (300, 900)), full[100:400, 7:907])
