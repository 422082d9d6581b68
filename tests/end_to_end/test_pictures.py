"""Runs on pictures by the command: episodes that show some later, ranks that show none, resuming, and learning."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from corerl.driver.export import export
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.recorded import file_of, read_rollout
from corerl.types import PICTURE, Array, FloatArray, SampleBatch
from corerl_testing import tolerances
from corerl_vision.shapes import ShapesOptions, rows
from tests.end_to_end import user_functions
from tests.end_to_end.command import ROOT, Command, metrics, numbers

EXAMPLE = ROOT / "examples/pictures.toml"
WEIGHTS = "checkpoints/step-00000004/actor/rank-00000.safetensors"
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
    arguments: Sequence[str | Path]  # of the command, but for its run.dir

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def batch(self, step: int) -> SampleBatch:
        return read_rollout(file_of(self.run_dir / "rollouts", step)).rollout.batch


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Four steps, with a checkpoint after the second."""
    directory = tmp_path_factory.mktemp("played")
    TOKENIZER.save_pretrained(directory / "tokenizer")
    write_rows(directory, [True] * 8, chat=True)
    rng = np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        shot = rng.integers(256, size=(height, width, 3)).astype(np.uint8)
        Image.fromarray(shot).save(directory / f"shot-{number}.png")
    arguments: list[str | Path] = [
        *("train", EXAMPLE, "backend.name=plain", "roles.actor.ranks=1", "rollout.replicas=1", "run.steps=4"),
        f"model.tokenizer={directory}/tokenizer",
        *("model.config.text_config.vocab_size=20", "model.config.text_config.max_position_embeddings=128"),
        *(f"data.source={directory}/rows.jsonl", "data.held_out=0", "eval.every=0", "rollout.save=true"),
        *("rollout.sampler=episodes", "samplers.episodes.function=tests.end_to_end.user_functions:play_with_shots"),
        f'samplers.episodes.options={{directory="{directory}"}}',
        *("rollout.prompts=4", "rollout.samples=4", "rollout.max_tokens=48", "train.mini_batches=2"),
        *("checkpoint.every=2", "checkpoint.keep=0", 'extensions=[{name="jsonl"}]'),
    ]
    finished = Played(directory, arguments)
    run(*arguments, f"run.dir={finished.run_dir}", logs=directory)
    return finished


def run(*arguments: str | Path, logs: Path) -> None:
    """The command, to its good end."""
    with Command(*arguments, logs=logs) as command:
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()


def write_rows(directory: Path, shown: Sequence[bool], *, chat: bool = False) -> None:
    """Rows in the layout of published sets, of which these show a picture file."""
    lines = []
    for number, (row, shows) in enumerate(zip(rows(ShapesOptions(rows=len(shown))), shown, strict=False)):
        (directory / f"{number}.png").write_bytes(row["images"][0])
        prompt = row["prompt"] if shows else row["prompt"].removeprefix("<image>")
        asked = [{"role": "user", "content": prompt}] if chat else prompt
        lines.append({"prompt": asked, "answer": row["answer"], "images": [f"{number}.png"] if shows else []})
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))


def pixels_of(path: Path) -> Array:
    return np.asarray(Image.open(path).convert("RGB"))


def shown_in(row: SampleBatch) -> list[Array]:
    """The pixels of the pictures that a row shows, in the order of its tokens; no picture follows itself."""
    numbers = [number for number, _ in itertools.groupby(row.columns[PICTURE]) if number]
    return [row.pictures[number - 1].pixels for number in numbers]


def rows_in(batch: SampleBatch) -> list[SampleBatch]:
    return [batch.take_rows(np.array([index])) for index in range(len(batch))]


def answers_in(tokens: Array, loss_mask: Array) -> list[str]:
    """What the policy said in each turn, without the token that ended it."""
    edges = np.flatnonzero(np.diff(np.r_[False, loss_mask, False])).reshape(-1, 2)
    said = [tokens[begin:end] for begin, end in edges]
    return [TOKENIZER.decode(each[: len(each) - int(each[-1] in (EOS, PLACEHOLDER))]) for each in said]


def without_special(text: str) -> str:
    """As clients get it."""
    return str(TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=True))


def rendered(messages: Sequence[Any], pictures: Sequence[Array]) -> list[int]:
    """What the chat template writes for the whole conversation, its pictures expanded by transformers' processor."""
    text = TOKENIZER.apply_chat_template(list(messages), tokenize=False)
    before, *parts = text.split("#")
    for picture, part in zip(pictures, parts, strict=True):
        grid = PROCESSOR(images=[Image.fromarray(picture)], return_tensors="np")["image_grid_thw"][0]
        before += "#" * int(grid.prod() // PROCESSOR.merge_size**2) + part
    return list(TOKENIZER.encode(before, add_special_tokens=False))


def test_rows_of_episodes_equal_the_rendered_conversation(played: Played) -> None:
    asked = {pixels_of(path).tobytes(): path for path in played.directory.glob("?.png")}
    shown = set()
    for step in range(4):
        for row in rows_in(played.batch(step)):
            if row.row_columns["turns"][0] != 2:
                continue  # the first answer had the token that stands for a picture, so that the episode was over
            first, last = answers_in(row.tokens, row.columns["loss_mask"])
            seen = shown_in(row)
            path = user_functions.shot_after(without_special(first), played.directory)
            shown.add(path)
            assert seen[0].tobytes() in asked and np.array_equal(seen[1], pixels_of(path))
            image, text = {"type": "image"}, {"type": "text", "text": "="}
            wanted = rendered(
                [
                    {"role": "user", "content": [image, {"type": "text", "text": "rs="}]},
                    {"role": "assistant", "content": first},
                    {"role": "tool", "content": [image, text]},
                    {"role": "assistant", "content": last},
                ],
                seen,
            )
            ended = int(row.tokens[-1] in (EOS, PLACEHOLDER))
            assert row.tokens[: len(row.tokens) - ended].tolist() == wanted[:-1]
    assert len(shown) == len(SIZES)


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
    for row in rows_in(played.batch(2)):  # sampled from the weights after two steps
        sampled = row.columns["rollout_logprobs"][row.columns["loss_mask"]]
        assert np.abs(logprobs_by(exported[2], row) - sampled).max() < tolerances.ENGINE_LOGPROBS
        assert np.abs(logprobs_by(exported[4], row) - sampled).max() > tolerances.ENGINE_LOGPROBS


def test_a_resumed_run_with_a_tower_equals_the_uninterrupted_one(played: Played, tmp_path: Path) -> None:
    resume = f"checkpoint.resume={played.run_dir}/checkpoints/step-00000002"
    run(*played.arguments, f"run.dir={tmp_path}/run", resume, logs=tmp_path)
    assert numbers(tmp_path / "run") == [line for line in numbers(played.run_dir) if line["step"] >= 2]
    found, wanted = load_file(tmp_path / "run" / WEIGHTS), load_file(played.run_dir / WEIGHTS)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert any("visual.patch_embed" in name for name in wanted)


def test_a_rank_that_shows_no_picture_changes_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path, [True, False, False, False])
    arguments = [
        *("train", EXAMPLE, f"data.source={tmp_path}/rows.jsonl", "data.held_out=0", "rollout.sampler=prompts"),
        *("rollout.prompts=4", "rollout.samples=1", "rollout.max_tokens=3", "rollout.replicas=1", "run.steps=3"),
        *("algorithm.name=reinforce++", "reward.name=tests.end_to_end.user_functions:share_of_zeros", "eval.every=0"),
        *("rollout.save=true", "checkpoint.export=false", 'extensions=[{name="jsonl"}]'),
    ]
    lines = []
    for ranks in (1, 2):
        run(*arguments, f"run.dir={tmp_path}/{ranks}", f"roles.actor.ranks={ranks}", logs=tmp_path)
        lines.append([line for line in numbers(tmp_path / str(ranks)) if "train/loss" in line])
        for step in range(3):
            batch = read_rollout(file_of(tmp_path / str(ranks) / "rollouts", step)).rollout.batch
            # Only one row shows a picture, so that one rank of two has none.
            assert np.count_nonzero(np.maximum.reduceat(batch.columns[PICTURE], batch.offsets[:-1])) == 1
    alone, both = lines
    assert len(alone) == 3 and all(line["train/grad_norm"] > 0 for line in alone)
    for found, wanted in zip(both, alone, strict=True):
        assert found.keys() == wanted.keys()
        for name in found:
            assert found[name] == pytest.approx(
                wanted[name], rel=tolerances.METRICS.relative, abs=tolerances.METRICS.absolute
            ), name


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
