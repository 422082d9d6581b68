"""Write a Hugging Face directory from a stream of tensors; it appears complete or not at all."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from corerl.errors import ModelError, SaveFailed
from corerl.models.lora import PEFT_CONFIG, PEFT_WEIGHTS
from corerl.models.readers import INDEX, SINGLE
from corerl.models.tokenizer import GENERATION
from corerl.weights.chunks import finite
from corerl.weights.files import write_tensors

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
HOW_LOADED = ("backend", "auto_map", "is_local", "local_files_only")  # written to a tokenizer_config.json all the same
FLOAT = "__float__"  # the only key of an object that transformers 5 writes for a number that JSON has not
INFINITE = re.compile(rf'\{{\s*"{FLOAT}":\s*"(-?)Infinity"\s*\}}')
# Model type -> what version 4 calls its kinds of layers; it refuses them by any other name.
OLD_LAYERS = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
NEW_CLASSES = ("TokenizersBackend", "SentencePieceBackend", "PythonBackend")  # of tokenizers, in transformers 5 only


def export_directory(
    path: str | Path,
    *,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Iterable[tuple[str, Tensor]],
    generation: Mapping[str, Any] | None = None,
    files: Iterable[Path] = (),
    kept: Iterable[tuple[str, Tensor]] = (),
    kept_config: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 2**30,
) -> int:
    """Write config, tokenizer, `tensors` (HF name, tensor), then `kept` as they are, the generation_config.json
    `generation`, and copies of `files` that are not among these to `path`; returns the bytes of the tensors.
    `kept_config`: fields of config.json to write as given.

    transformers 4, on which engines are, reads the directory too. Raises ModelError for a tensor with NaN or infinite
    values.

    At most one shard of `shard_bytes` is held in memory. Each tensor is copied to the CPU as it comes, so the stream
    may reuse its buffers. Tied weights come once, under the name used in the files. Called by one process; an existing
    directory is replaced only when the new one is complete. Raises SaveFailed if writing fails.
    """
    with _staged(Path(path)) as staging:
        written, dtype = _write_shards(staging, tensors, kept, shard_bytes)
        config = copy.deepcopy(config)
        config.dtype = config.get_text_config().dtype = dtype
        write_config(config, staging)
        if kept_config:
            _rewrite(staging / CONFIG, lambda written: {**written, **kept_config})
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
            _rewrite(staging / TOKENIZER_CONFIG, lambda written: _older_tokenizer(written, tokenizer.name_or_path))
        if generation is not None:
            (staging / GENERATION).write_text(_json(generation), encoding="utf-8")
        for file in files:
            if not (staging / file.name).exists():
                shutil.copyfile(file, staging / file.name)
    return written


def write_adapters(path: str | Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write a directory of PEFT: the adapters `tensors` and the adapter_config.json `config`. As `export_directory`."""
    with _staged(Path(path)) as staging:
        for name, tensor in tensors.items():
            if not finite(tensor):
                raise ModelError(f"{name!r} has NaN or infinite values as {tensor.dtype}; nothing is exported")
        held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_tensors(held, staging / PEFT_WEIGHTS, metadata={"format": "pt"})
        (staging / PEFT_CONFIG).write_text(_json(config), encoding="utf-8")


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A directory to write to, which takes the place of `path` once the block is done. Raises SaveFailed if writing
    fails."""
    path = path.resolve()  # keeps a link to another disk
    staging, replaced = path.with_name(f".{path.name}.writing"), path.with_name(f".{path.name}.replaced")
    try:
        for left_over in (staging, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        if path.exists():
            os.rename(path, replaced)
        os.rename(staging, path)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)  # free the disk space again
        if replaced.exists() and not path.exists():
            os.rename(replaced, path)
        if isinstance(error, OSError | SafetensorError):  # safetensors raises the latter for a full disk
            raise SaveFailed(f"the model could not be exported to {path}: {error}") from error
        raise


def write_config(config: PreTrainedConfig, directory: Path) -> None:
    """Write a config.json in the words of transformers 5 and in those of version 4."""
    config.save_pretrained(directory)
    _rewrite(directory / CONFIG, lambda written: {**written, **_older_names(config, written)})


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the contents of a JSON file."""
    file.write_text(_json(change(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")


def _json(value: Any) -> str:
    """JSON, in which an infinity is a number that is too large for a float: every version of transformers reads that as
    infinite. Version 5 itself writes an object, which version 4 would take for the setting; that one wrote Infinity,
    which is no JSON. NaN stays such an object."""
    text = json.dumps(_tagged(value), indent=2, sort_keys=True, allow_nan=False)
    return INFINITE.sub(r"\g<1>1e999", text) + "\n"


def _tagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tagged(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value


def _older_names(config: PreTrainedConfig, written: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says in names that transformers 5 writes, in those that version 4 reads; both read them.
    Where it lacks them, version 4 silently takes its defaults, such as another rotary base."""
    older = {alias: written[name] for alias, name in config.attribute_map.items() if name in written}
    if dtype := written.get("dtype"):
        older["torch_dtype"] = dtype
    if layers := OLD_LAYERS.get(config.model_type):
        older["layer_types"] = older["layers_block_type"] = [layers.get(kind, kind) for kind in config.layer_types]
    if (text := config.get_text_config()) is not config and "text_config" in written:
        older["text_config"] = {**written["text_config"], **_older_names(text, written["text_config"])}
    rope = written.get("rope_parameters")
    if not rope:
        return older
    sliding = rope.get("sliding_attention") or {}
    full = dict(rope if "rope_type" in rope else rope.get("full_attention") or {})
    neox = config.model_type.startswith("gpt_neox")
    names = {
        "rope_theta": "rotary_emb_base" if neox else "rope_theta",
        "partial_rotary_factor": "rotary_pct" if neox else "partial_rotary_factor",
    }
    older |= {name: full.pop(own) for own, name in names.items() if own in full}
    if full.get("rope_type") == "longrope":  # Phi-3 takes no other field here
        if (positions := full.pop("original_max_position_embeddings", None)) is not None:
            older["original_max_position_embeddings"] = positions
        full["type"] = full.pop("rope_type")
    plain = full.get("rope_type") == "default" and "mrope_section" not in full  # positions of three axes
    older["rope_scaling"] = None if plain else full
    if "rope_theta" in sliding:
        modernbert = config.model_type.startswith("modernbert")
        older["local_rope_theta" if modernbert else "rope_local_base_freq"] = sliding["rope_theta"]
        if modernbert and "rope_theta" in older:
            older["global_rope_theta"] = older["rope_theta"]
    return older


def _older_tokenizer(written: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A tokenizer_config.json with a class that transformers 4 has: the one in the directory `source` that the
    tokenizer is from, if there is one, else the general one; special tokens as version 4 lists them."""
    older = {key: value for key, value in written.items() if key not in HOW_LOADED}
    if older.get("tokenizer_class") in NEW_CLASSES:
        file = Path(source) / TOKENIZER_CONFIG
        named = json.loads(file.read_bytes()).get("tokenizer_class") if source and file.is_file() else None
        older["tokenizer_class"] = named if named and named not in NEW_CLASSES else "PreTrainedTokenizerFast"
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def _write_shards(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], kept: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> tuple[int, str]:
    """Write the shards; returns bytes, and the dtype of most of `tensors`. Shards are named at the end, when their
    number is known."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    held = total = 0
    dtypes: Counter[str] = Counter()

    def flush() -> None:
        write_tensors(shard, directory / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    new = ((name, tensor, True) for name, tensor in tensors)
    old = ((name, tensor, False) for name, tensor in kept)
    for name, tensor, made in itertools.chain(new, old):
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
            held = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += size
        total += size
        if not made:
            continue
        if not finite(shard[name]):
            raise ModelError(f"{name!r} has NaN or infinite values as {tensor.dtype}; nothing is exported")
        dtypes[str(tensor.dtype).removeprefix("torch.")] += size
    flush()
    ((dtype, _),) = dtypes.most_common(1)
    if len(shards) == 1:
        os.rename(directory / "0.part", directory / SINGLE)
        return total, dtype
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for index, file in enumerate(files):
        os.rename(directory / f"{index}.part", directory / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return total, dtype
