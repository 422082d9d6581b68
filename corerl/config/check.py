"""What a configuration says that cannot be meant: checks across fields, long before the first GPU minute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from corerl.config.schema import Config


def problems(config: Config) -> list[str]:
    """One line for each contradiction, its dotted path first; empty where the configuration can run."""
    return [*_model(config), *_batch(config), *_algorithm(config), *_extensions(config), *_files(config)]


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if not model.path and not model.config:
        yield (
            "model.path: neither model.path nor model.config is given; "
            "set model.path to a Hugging Face directory, or model.config to start from random weights"
        )
    if model.path and model.config:
        yield (
            f"model.config: given beside model.path={model.path!r}; "
            "keep model.path to train its weights, or model.config to start from random ones"
        )
    if model.config and "model_type" not in model.config:
        yield "model.config.model_type: missing; name the architecture, such as 'qwen3'"
    if model.config and not model.path and not model.tokenizer:
        yield (
            "model.tokenizer: empty, and model.config brings no tokenizer; "
            "set a tokenizer directory, or 'characters:ABC' for one token a character"
        )
    if model.tokenizer == "characters:":
        yield "model.tokenizer: 'characters:' lists no characters; write them behind it, as in 'characters:ABC'"


def _batch(config: Config) -> Iterator[str]:
    train = config.train_of("actor")
    table = "train" if config.roles.actor.train is None else "roles.actor.train"
    prompts, samples, ranks = config.rollout.prompts, config.rollout.samples, config.roles.actor.ranks
    if prompts % train.mini_batches:
        yield (
            f"rollout.prompts: {prompts} does not split into {table}.mini_batches={train.mini_batches} equal "
            f"optimizer steps; {_use_multiple(prompts, train.mini_batches)}"
        )
    elif (step := prompts * samples // train.mini_batches) % ranks:
        unit = train.mini_batches * ranks // math.gcd(ranks, samples)  # in prompts, so that groups stay whole
        yield (
            f"rollout.prompts: {prompts} x rollout.samples={samples} / {table}.mini_batches={train.mini_batches} makes "
            f"{step} samples an optimizer step, which does not divide over roles.actor.ranks={ranks}; "
            f"{_use_multiple(prompts, unit)}, or a number of ranks that divides {step}"
        )


def _use_multiple(value: int, unit: int) -> str:
    return f"use a multiple of {unit}, such as {-(-value // unit) * unit}"


def _algorithm(config: Config) -> Iterator[str]:
    if config.rollout.samples < 2:
        yield "rollout.samples: 1 leaves a sample nothing to compare with, so that every advantage is 0; use at least 2"


def _extensions(config: Config) -> Iterator[str]:
    counts = Counter(extension.name for extension in config.extensions)
    for name, count in counts.items():
        if count > 1:
            yield f"extensions: {name!r} stands there {count} times; keep one"


def _files(config: Config) -> Iterator[str]:
    if config.model.path and not Path(config.model.path).is_dir():
        yield f"model.path: no directory {config.model.path!r}; give a downloaded Hugging Face model directory"
    resume = config.checkpoint.resume
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        yield f"checkpoint.resume: no directory {resume!r}; give 'never', 'auto', or a checkpoint's directory"
