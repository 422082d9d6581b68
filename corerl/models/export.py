"""Write a Hugging Face directory from a stream of tensors; it appears complete or not at all."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from corerl.errors import ModelError, SaveFailed
from corerl.models.lora import PEFT_CONFIG, PEFT_WEIGHTS
from corerl.models.readers import INDEX, SINGLE
from corerl.models.tokenizer import CONFIG, GENERATION
from corerl.weights.chunks import finite
from corerl.weights.files import write_tensors


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

    At most one shard of `shard_bytes` is held in memory. Each tensor is copied to the CPU as it comes, so the stream
    may reuse its buffers. Tied weights come once, under the name used in the files. Called by one process; an existing
    directory is replaced only when the new one is complete. Raises SaveFailed if writing fails, and ModelError for a
    tensor with NaN or infinite values.
    """
    with _staged(Path(path)) as staging:
        written, dtype = _write_shards(staging, tensors, kept, shard_bytes)
        config = copy.deepcopy(config)
        config.dtype = config.get_text_config().dtype = dtype
        config.save_pretrained(staging)
        if kept_config:
            written_config = json.loads((staging / CONFIG).read_text(encoding="utf-8"))
            _write_json(staging / CONFIG, {**written_config, **kept_config})
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        if generation is not None:
            _write_json(staging / GENERATION, generation)
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
        _write_json(staging / PEFT_CONFIG, config)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
