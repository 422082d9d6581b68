"""Write a Hugging Face directory from a stream of tensors; it appears complete or not at all."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from corerl.errors import SaveFailed
from corerl.models.readers import INDEX, SINGLE
from corerl.models.tokenizer import GENERATION


def export_directory(
    path: str | Path,
    *,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Iterable[tuple[str, Tensor]],
    generation: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 2**30,
) -> int:
    """Write config, tokenizer, `tensors` (HF name, tensor) and the generation_config.json `generation` to `path`;
    returns the bytes of the tensors.

    At most one shard of `shard_bytes` is held in memory. Each tensor is copied to the CPU as it comes, so the stream
    may reuse its buffers. Tied weights come once, under the name used in the files. Called by one process; an existing
    directory is replaced only when the new one is complete. Raises SaveFailed if writing fails.
    """
    path = Path(path).resolve()  # keeps a link to another disk
    staging, replaced = path.with_name(f".{path.name}.writing"), path.with_name(f".{path.name}.replaced")
    try:
        for left_over in (staging, replaced):
            shutil.rmtree(left_over, ignore_errors=True)
        staging.mkdir(parents=True)
        written, dtype = _write_shards(staging, tensors, shard_bytes)
        config = copy.deepcopy(config)
        config.dtype = dtype
        config.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        if generation is not None:
            (staging / GENERATION).write_text(json.dumps(generation, indent=2), encoding="utf-8")
        if path.exists():
            os.rename(path, replaced)
        os.rename(staging, path)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors raises the latter for a full disk
        shutil.rmtree(staging, ignore_errors=True)  # free the disk space again
        if replaced.exists() and not path.exists():
            os.rename(replaced, path)
        raise SaveFailed(f"the model could not be exported to {path}: {error}") from error
    return written


def _write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> tuple[int, str]:
    """Write the shards; returns bytes and dtype. Shards are named at the end, when their number is known."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    held = total = 0
    dtype = ""

    def flush() -> None:
        save_file(shard, directory / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
            held = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += size
        total += size
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
    flush()
    if len(shards) == 1:
        os.rename(directory / "0.part", directory / SINGLE)
        return total, dtype
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for index, file in enumerate(files):
        os.rename(directory / f"{index}.part", directory / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return total, dtype
