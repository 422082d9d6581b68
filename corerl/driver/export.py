"""Export a checkpoint's weights as a Hugging Face model directory, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from corerl.checkpoint.format import WEIGHTS
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.load import structure
from corerl.config.schema import Config, ModelConfig
from corerl.errors import ModelError
from corerl.models.build import VALUE_HEAD_WEIGHT
from corerl.models.config import hf_config
from corerl.models.export import export_directory
from corerl.models.readers import INDEX, SINGLE, SafetensorsSource
from corerl.models.tokenizer import GENERATION, end_tokens, load_tokenizer
from corerl.plain_json import read_json_file
from corerl.plan.state import read_run

SHARD_BYTES = 4 * 2**30
# Copied from the tokenizer's directory: tokenizers of older versions read them beside what is written.
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "special_tokens_map.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(checkpoint: Path, directory: Path, *, role: str = "actor", dtype: str = "", replace: bool = False) -> Path:
    """Write `role`'s weights with its config and tokenizer; returns `directory`. `dtype` is a key of DTYPES; if it is
    empty, bfloat16 where the model came in that, else the precision it was trained in.

    With `replace`, an existing directory is replaced only once the new one is complete.
    Raises ModelError if `directory` exists and `replace` is not set, and CheckpointError if the checkpoint lacks a
    tensor of the role's model or has one in another shape.
    """
    from corerl.plan import model_files  # slow to import: takes seconds

    if directory.exists() and not replace:
        raise ModelError(f"{directory} already exists; remove it, or choose another directory")
    config = structure(read_run(checkpoint)["config"], Config, path="")
    if role not in (held := [each for each in config.chosen_roles if (checkpoint / each).is_dir()]):
        raise ModelError(f"{checkpoint} has no role {role!r}; it has: {', '.join(held)}")
    model = config.model_of(role)
    hf = hf_config(model)
    source = CheckpointSource(checkpoint / role, *WEIGHTS)
    built = model_files.built(hf, value_head=VALUE_HEAD_WEIGHT in source.shapes)
    model_files.require_same_model(checkpoint, role, built)  # else nothing could load the export
    kept = DTYPES[
        dtype or ("bfloat16" if _came_in_bfloat16(hf, model) else config.train_of(role).settled("cpu").precision)
    ]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in source.shapes.items():
            yield name, source.read(name, (0,) * len(shape), shape).to(kept)

    tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path=config.model.path)
    exported = _with_special_tokens(hf, tokenizer)
    export_directory(
        directory,
        config=exported,
        tokenizer=tokenizer,
        tensors=tensors(),
        generation=_generation(exported, model, end_tokens(tokenizer, model)),
        files=_of(config.model.tokenizer or config.model.path, TOKENIZER_FILES),
        shard_bytes=SHARD_BYTES,
    )
    return directory


def _came_in_bfloat16(config: PreTrainedConfig, model: ModelConfig) -> bool:
    """Whether the model's config says so or, if it says nothing, most of the tensors in its files are."""
    if not model.path:
        return False
    if config.dtype is not None:
        return str(config.dtype).removeprefix("torch.") == "bfloat16"
    if not any((Path(model.path) / name).is_file() for name in (SINGLE, INDEX)):
        return False
    ((most, _),) = SafetensorsSource(model.path).dtypes.most_common(1) or [("", 0)]
    return most == "BF16"


def _with_special_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Fill in the special tokens that the config leaves open. `generate` takes them from there, and would otherwise
    never end a response."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        # Only one that the model has an embedding for: transformers cannot build a model that pads with another.
        if getattr(config, name, None) is None and token is not None and token < config.get_text_config().vocab_size:
            setattr(config, name, token)
    return config


def _generation(config: PreTrainedConfig, model: ModelConfig, ends: Sequence[int]) -> dict[str, Any]:
    """The export's generation_config.json: the authors' settings if there are any, and all tokens that ended the run's
    samples. Without the file, `generate` would take only what config.json names."""
    known: dict[str, Any] = {name: getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")}
    file = Path(model.path) / GENERATION
    if model.path and file.is_file():
        known |= read_json_file(file)
    size = config.get_text_config().vocab_size
    for name in ("bos_token_id", "pad_token_id", "decoder_start_token_id"):
        if isinstance(token := known.get(name), int) and not 0 <= token < size:
            known[name] = None  # `generate` would look up an embedding that is not there
    known["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends) or None
    return {name: value for name, value in known.items() if value is not None}


def _of(directory: str, names: Sequence[str]) -> list[Path]:
    """Those of the files `names` that `directory` has."""
    return [file for name in names if directory and (file := Path(directory) / name).is_file()]
