"""Runs on pictures by the command: episodes that show some later, what is exported of them, and learning."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from corerl.driver.export import export
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.recorded import file_of, read_rollout
from corerl.types import PICTURE, Array, FloatArray, SampleBatch
from corerl_testing import tolerances
from corerl_vision.shapes import ShapesOptions, rows
from tests.end_to_end.command import ROOT, Command, metrics

EXAMPLE = ROOT / "examples/pictures.toml"
TOKENIZER = load_tokenizer(tokenizer="characters:01234=rgbsct#ua:", path="")
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '#' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PLACEHOLDER, EOS = TOKENIZER.convert_tokens_to_ids("#"), TOKENIZER.eos_token_id
PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=4, temporal_patch_size=1, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 65536}
)
SIZES = ((32, 32), (48, 32), (32, 64))  # of the pictures that the tool shows


@frozen
class Played:
    """A run of episodes that has ended by itself."""

    directory: Path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Four steps, with a checkpoint after the second."""
    directory = tmp_path_factory.mktemp("played")
    TOKENIZER.save_pretrained(directory / "tokenizer")
    lines = []
    for number, row in enumerate(rows(ShapesOptions(rows=8))):
        (directory / f"{number}.png").write_bytes(row["images"][0])
        asked = [{"role": "user", "content": row["prompt"]}]
        lines.append(json.dumps({"prompt": asked, "answer": row["answer"], "images": [f"{number}.png"]}))
    (directory / "rows.jsonl").write_text("\n".join(lines))
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate(((32, 32), (48, 32), (32, 64))):  # that the tool shows
        shot = rng.integers(256, size=(height, width, 3)).astype(np.uint8)
        Image.fromarray(shot).save(directory / f"shot-{number}.png")
    arguments: list[str | Path] = [
        *("train", EXAMPLE, "backend.name=plain", "roles.actor.ranks=1", "rollout.replicas=1", "run.steps=4"),
        *(f"model.tokenizer={directory}/tokenizer", f"run.dir={directory}/run"),
        *("model.config.text_config.vocab_size=20", "model.config.text_config.max_position_embeddings=128"),
        *(f"data.source={directory}/rows.jsonl", "data.held_out=0", "eval.every=0", "rollout.save=true"),
        *("rollout.sampler=episodes", "samplers.episodes.function=tests.end_to_end.user_functions:play_with_shots"),
        f'samplers.episodes.options={{directory="{directory}"}}',
        *("rollout.prompts=4", "rollout.samples=4", "rollout.max_tokens=48", "train.mini_batches=2"),
        *("checkpoint.every=2", "checkpoint.keep=0", 'extensions=[{name="jsonl"}]'),
    ]
    with Command(*arguments, logs=directory) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    return Played(directory)


def shown_in(row: SampleBatch) -> list[Array]:
    """The pixels of the pictures that a row shows, in the order of its tokens; no picture follows itself."""
    numbers = [number for number, _ in itertools.groupby(row.columns[PICTURE]) if number]
    return [row.pictures[number - 1].pixels for number in numbers]


def tensors_of(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters())


@pytest.fixture(scope="module")
def exported(played: Played) -> dict[int, Any]:
    """transformers' own model of each checkpoint, to which no weight was missing or unknown."""
    models = {}
    for step in (2, 4):
        directory = export(played.run_dir / f"checkpoints/step-{step:08d}", played.directory / f"export-{step}")
        models[step], info = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return models


def test_trainer_and_engine_agree_and_every_weight_changes(played: Played, exported: dict[int, Any]) -> None:
    steps = [line for line in metrics(played.run_dir) if "train/loss" in line]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert all(line["rollout/logprob_diff_max"] < tolerances.ENGINE_LOGPROBS for line in steps)
    assert all(math.isfinite(line["train/loss"]) and line["train/grad_norm"] > 0 for line in steps)
    before, after = tensors_of(exported[2]), tensors_of(exported[4])
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert any("visual.patch_embed" in name for name in before)


@torch.no_grad()
def logprobs_by(model: Any, row: SampleBatch) -> FloatArray:
    """[n] of the tokens that the policy chose in a row, in a pass over this row alone."""
    tokens, mask = torch.tensor(row.tokens[None]), row.columns["loss_mask"]
    places = (tokens == PLACEHOLDER) & torch.tensor(row.columns[PICTURE][None] > 0)
    made = PROCESSOR(images=[Image.fromarray(each) for each in shown_in(row)], return_tensors="pt")
    tokens[(tokens == PLACEHOLDER) & ~places] = EOS  # the last of the row, which nothing is read behind
    logits = model(input_ids=tokens, mm_token_type_ids=places.int(), use_cache=False, **made).logits[0, :-1]
    chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(row.tokens[1:, None]))[:, 0]
    return chosen.numpy()[mask[1:]]


def test_the_export_of_a_tower_has_the_engines_logprobs(played: Played, exported: dict[int, Any]) -> None:
    batch = read_rollout(file_of(played.run_dir / "rollouts", 2)).rollout.batch  # from the weights after two steps
    for row in (batch.take_rows(np.array([index])) for index in range(len(batch))):
        sampled = row.columns["rollout_logprobs"][row.columns["loss_mask"]]
        assert np.abs(logprobs_by(exported[2], row) - sampled).max() < tolerances.ENGINE_LOGPROBS
        assert np.abs(logprobs_by(exported[4], row) - sampled).max() > tolerances.ENGINE_LOGPROBS


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shuffled", [False, True])
def test_counting_is_learned_from_the_questions_own_picture(shuffled: bool, tmp_path: Path) -> None:
    arguments = ["train", EXAMPLE, f"run.dir={tmp_path}/run", 'extensions=[{name="jsonl"}]']
    with Command(*arguments, f"samplers.count-shapes.shuffled={str(shuffled).lower()}", logs=tmp_path) as command:
        assert command.finish(within=3000) == 0, command.err
    scores = [line["eval/exact_match"] for line in metrics(tmp_path / "run") if "eval/exact_match" in line]
    steps = tomllib.loads(EXAMPLE.read_text())["run"]["steps"]
    assert len(scores) == 1 + steps // 25 and scores[0] < 0.35
    assert scores[-1] < 0.35 if shuffled else scores[-1] > 0.9
