from __future__ import annotations

import json
import math
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from corerl.config.schema import ModelConfig
from corerl.errors import ModelError, SaveFailed
from corerl.kinds import experts_of
from corerl.models.config import hf_config
from corerl.models.export import export_directory, write_adapters
from corerl.models.lora import PEFT_CONFIG, PEFT_WEIGHTS
from corerl.models.names import hf_boxes
from corerl.models.readers import INDEX, SINGLE
from corerl.models.tokenizer import character_tokenizer
from corerl_testing import smallest_config
from corerl_testing.models import tiny_config
from tests.pictures import pictures_config


def stream(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every HF tensor through one buffer that is used again, as a weight stream hands them out."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    params, buffer = dict(model.named_parameters()), torch.empty(97 * 64)
    for name, boxes in hf_boxes(model).items():
        for box in boxes:
            view = box.view(params[name].detach())
            yield box.name, buffer[: view.numel()].view(view.shape).copy_(view)
    buffer.fill_(torch.nan)


@pytest.mark.parametrize("shard_bytes", [100_000, 2**30])
def test_an_export_loads_in_transformers_without_a_missing_or_unexpected_key(
    tiny_model: Path, tmp_path: Path, shard_bytes: int
) -> None:
    path, tokenizer = tmp_path / "hf", character_tokenizer("abc")
    config = hf_config(ModelConfig(path=str(tiny_model)))
    written = export_directory(
        path, config=config, tokenizer=tokenizer, tensors=stream(tiny_model), shard_bytes=shard_bytes
    )
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert loaded.dtype == torch.float32 and loaded.config.architectures == [type(wanted).__name__]
    assert loaded.state_dict().keys() == wanted.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in wanted.state_dict().items())
    assert AutoTokenizer.from_pretrained(path).encode("cab") == tokenizer.encode("cab")

    files = list(path.glob("*.safetensors"))
    assert written == sum(t.numel() * 4 for file in files for t in load_file(file).values())
    assert (path / INDEX).exists() == (len(files) > 1) == (shard_bytes < written)
    assert (path / SINGLE).exists() == (len(files) == 1)
    assert all(sum(t.numel() * 4 for t in load_file(file).values()) <= shard_bytes for file in files)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_an_export_that_fails_leaves_the_earlier_one_as_it_was(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = hf_config(ModelConfig(path=str(tiny_models["qwen3"]))), tmp_path / "hf"
    export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.ones(2))])

    def full_disk() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(SaveFailed, match="could not be exported to .*No space left"):
        export_directory(path, config=config, tokenizer=None, tensors=full_disk(), shard_bytes=1)
    rename = os.rename

    def refuses_the_new_one(source: Path, target: Path) -> None:
        if source.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as own:
        own.setattr(os, "rename", refuses_the_new_one)
        with pytest.raises(SaveFailed, match="Input/output error"):
            export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.zeros(2))])
    assert torch.equal(load_file(path / SINGLE)["a"], torch.ones(2))
    export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.zeros(2))])
    assert torch.equal(load_file(path / SINGLE)["a"], torch.zeros(2))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf"]


def test_adapters_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path, tensors = tmp_path / "adapters", {"a": torch.ones(2, 3).T, "b": torch.zeros(4)}
    write_adapters(path, tensors, {"r": 3, "lora_alpha": 7.5})
    assert json.loads((path / PEFT_CONFIG).read_text()) == {"r": 3, "lora_alpha": 7.5}

    def assert_as_before() -> None:
        found = load_file(path / PEFT_WEIGHTS)
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert [entry.name for entry in tmp_path.iterdir()] == ["adapters"]

    assert_as_before()
    with pytest.raises(ModelError, match="^'b' has NaN or infinite values as torch.float32; nothing is exported$"):
        write_adapters(path, {**tensors, "b": torch.tensor([1.0, math.nan])}, {})
    assert_as_before()
    with pytest.raises(SaveFailed, match="the model could not be exported to /dev/null/adapters: "):
        write_adapters("/dev/null/adapters", tensors, {})
    write_adapters(path, {"a": torch.zeros(1)}, {"r": 1})
    assert load_file(path / PEFT_WEIGHTS).keys() == {"a"}


def test_a_link_to_a_directory_stays_one_export_after_export(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config, path = hf_config(ModelConfig(path=str(tiny_models["qwen3"]))), tmp_path / "run/model"
    for directory in ("run", "large/model"):
        (tmp_path / directory).mkdir(parents=True)
    path.symlink_to(tmp_path / "large/model")
    for value in (1.0, 2.0, 3.0):
        export_directory(path, config=config, tokenizer=None, tensors=[("a", torch.full((2,), value))])
        assert path.is_symlink()
        assert torch.equal(load_file(tmp_path / "large/model" / SINGLE)["a"], torch.full((2,), value))
    assert [entry.name for entry in (tmp_path / "large").iterdir()] == ["model"]


def test_a_disk_that_is_full_amid_a_shard_is_told_and_nothing_half_written_stays(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = hf_config(ModelConfig(path=str(tiny_model)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(SaveFailed, match=r"^the model could not be exported to .*/hf: "):
            export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=stream(tiny_model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
LONG = {"rope_type": "longrope", "rope_theta": 2e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PARTIAL = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}
LAYERS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 4e5},
}
LOCAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    "full_attention": {"rope_type": "default", "rope_theta": 4e5},
}
NEW = ("rope_parameters", "dtype", "num_local_experts")  # what transformers 4 does not read


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}),
        ("qwen2", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen3_moe", {"num_experts": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}),
        ("phi", {"rope_parameters": PARTIAL}),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64, "pad_token_id": None}),
        ("gpt_neox", {"rope_parameters": PARTIAL}),
        ("gemma3_text", {"rope_parameters": LAYERS, "num_hidden_layers": 6}),
        ("modernbert-decoder", {"rope_parameters": LOCAL, "num_hidden_layers": 2}),
        ("gpt2", {}),
    ],
)
def test_older_names_in_an_exported_config_mean_the_same(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """transformers still reads the names of version 4, and here nothing else."""
    config = AutoConfig.for_model(
        kind, **{"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512, **fields}
    )
    tensors = [("a", torch.zeros(2, dtype=torch.bfloat16))]
    export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=tensors)
    file = tmp_path / "hf/config.json"
    written = json.loads(file.read_text())
    as_written = AutoConfig.from_pretrained(tmp_path / "hf")
    file.write_text(json.dumps({name: value for name, value in written.items() if name not in NEW}))
    for read in (as_written, AutoConfig.from_pretrained(tmp_path / "hf")):
        assert read.dtype == torch.bfloat16
        found, wanted = (
            {name: value for name, value in (each or {}).items() if name != "type"}  # the older name of rope_type
            for each in (getattr(read, "rope_parameters", None), getattr(config, "rope_parameters", None))
        )
        assert found == wanted
        assert experts_of(read.to_dict()) == experts_of(config.to_dict())


# Model type -> what the config classes of transformers 4.57.1 take, with their defaults: the oldest version with all of
# these types, of which an environment of its own would be a gigabyte.
OLDER = json.loads(Path(__file__).with_name("transformers_4_57.json").read_text())
UNSAID = {  # what an export need not say for version 4 to build the same model
    ("deepseek_v2", "aux_loss_alpha"): "its loss is not trained",
    ("deepseek_v2", "seq_aux"): "its loss is not trained",
    ("gemma", "hidden_activation"): "without it, gelu_pytorch_tanh is taken, as in version 5",
    ("granitemoehybrid", "layer_types"): "it is said in other words; see below",
    ("jamba", "num_logits_to_keep"): "chooses what is returned",
    ("jamba", "sliding_window"): "version 5 has none, which is the default",
    ("longcat_flash", "num_hidden_layers"): "the model sets it to twice num_layers",
    ("mamba2", "rms_norm"): "version 5 always has the norm, which is the default",
    ("modernbert-decoder", "global_attn_every_n_layers"): "layer_types says it",
}
MOVED = "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "rotary_emb_base", "rotary_pct"
MOVED += "global_rope_theta", "local_rope_theta"  # to rope_parameters, whose values the test above compares


@pytest.mark.parametrize("kind", OLDER)
def test_the_config_classes_of_transformers_4_take_from_an_exported_config_what_it_means(
    kind: str, tmp_path: Path
) -> None:
    config = smallest_config(kind)
    export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=[("a", torch.zeros(2))])
    written = json.loads((tmp_path / "hf/config.json").read_text())
    wrong = {}
    for name, default in OLDER[kind].items():
        if name in MOVED:
            took, meant = name in written, bool(getattr(config, "rope_parameters", None))
        else:
            took, meant = written.get(name, default), getattr(config, name, "a field that is no more")
        if took != (list(meant) if isinstance(meant, tuple) else meant) and (kind, name) not in UNSAID:
            wrong[name] = (took, meant)
    assert wrong == {}


def strict(text: str) -> Any:
    """Read JSON, and nothing but JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_an_infinite_setting_is_a_number_to_every_version_and_the_file_is_json(tmp_path: Path) -> None:
    config = smallest_config("mamba2", time_step_limit=(0.5, float("inf")))
    config.lowest, config.unset, config.word = -float("inf"), float("nan"), '{"__float__": "Infinity"}'
    tensors, generation = [("a", torch.zeros(2))], {"length_penalty": float("inf"), "top_k": 5}
    export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=tensors, generation=generation)
    written = strict((tmp_path / "hf/config.json").read_text())
    assert (written["time_step_limit"], written["lowest"]) == ([0.5, float("inf")], -float("inf"))
    assert (written["unset"], written["word"]) == ({"__float__": "NaN"}, config.word)
    read = AutoConfig.from_pretrained(tmp_path / "hf")
    assert (list(read.time_step_limit), read.lowest, read.word) == ([0.5, float("inf")], -float("inf"), config.word)
    assert math.isnan(read.unset)
    assert strict((tmp_path / "hf/generation_config.json").read_text()) == generation


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    config = tiny_config("llama")
    for dtype, value in ((torch.float32, torch.nan), (torch.bfloat16, -torch.inf), (torch.float16, 1e5)):
        tensors = [("a", torch.ones(2)), ("b.weight", torch.tensor([1.0, value]).to(dtype))]
        told = rf"^'b.weight' has NaN or infinite values as {dtype}; nothing is exported$"
        with pytest.raises(ModelError, match=told):
            export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_an_exported_tokenizer_has_a_class_and_special_tokens_that_older_versions_know(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    config, tensors = tiny_config("llama"), [("a", torch.zeros(2))]

    def exported(name: str, of: Any) -> tuple[dict[str, Any], Any]:
        export_directory(tmp_path / name, config=config, tokenizer=of, tensors=tensors)
        loaded = AutoTokenizer.from_pretrained(tmp_path / name)
        assert loaded.encode("c<|end|>a") == tokenizer.encode("c<|end|>a")
        assert loaded.decode(loaded.encode("c<|end|>a"), skip_special_tokens=True) == "ca"
        messages = [{"role": "user", "content": "ab"}]
        assert loaded.apply_chat_template(messages, tokenize=False) == "ab<|end|>"
        return json.loads((tmp_path / name / "tokenizer_config.json").read_text()), loaded

    written, loaded = exported("first", tokenizer)
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<|turn|>", "<|end|>"] and "extra_special_tokens" not in written
    again, _ = exported("second", loaded)  # a model that was trained further
    assert again == written
    file = tmp_path / "first/tokenizer_config.json"
    file.write_text(
        json.dumps({**written, "tokenizer_class": "LlamaTokenizerFast", "auto_map": {"AutoTokenizer": "x.Y"}})
    )
    published, _ = exported("third", AutoTokenizer.from_pretrained(tmp_path / "first", trust_remote_code=False))
    assert "auto_map" not in published and published["tokenizer_class"].startswith("LlamaTokenizer")


def test_text_inside_another_config_has_the_older_names_too(tmp_path: Path) -> None:
    config = pictures_config("qwen3_vl")
    export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=[("a", torch.zeros(2))])
    text = json.loads((tmp_path / "hf/config.json").read_text())["text_config"]
    assert text["rope_theta"] == 1e4 and text["torch_dtype"] == text["dtype"] == "float32"
    # Without its sections the positions of pictures would be other ones.
    assert text["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def test_kept_tensors_are_written_as_they_are(tmp_path: Path) -> None:
    kept = {"tower": torch.full((64,), torch.nan, dtype=torch.float16), "positions": torch.arange(3)}
    config = AutoConfig.for_model("qwen3")
    tensors = [("a", torch.zeros(2, dtype=torch.bfloat16))]
    export_directory(tmp_path / "hf", config=config, tokenizer=None, tensors=tensors, kept=kept.items(), shard_bytes=64)
    held = {name: each for file in (tmp_path / "hf").glob("*.safetensors") for name, each in load_file(file).items()}
    assert held.keys() == {"a", *kept}
    assert all(torch.equal(held[name].view(torch.uint8), each.view(torch.uint8)) for name, each in kept.items())
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16  # of what was trained
