"""What a user can get wrong: one clear line on stderr, exit status 2, and nothing of an earlier run is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from corerl.checkpoint.commit import latest
from tests.end_to_end.command import Command, content, steps_done, write_small
from tests.end_to_end.conftest import Finished

REWARDS = '''
calls = 0

def to_nan(prompt, response):
    """A number for the 16 held-out prompts and the 32 samples of the first step, and then none."""
    global calls
    calls += 1
    return len(response) / 8 if calls <= 48 else float("nan")
'''


def copy_of(uninterrupted: Finished, tmp_path: Path, *steps: int) -> Path:
    """The run directory of a finished run with some of its checkpoints, to be spoilt."""
    run_dir = tmp_path / "earlier"
    for step in steps:
        name = f"checkpoints/step-{step:08d}"
        shutil.copytree(uninterrupted.run_dir / name, run_dir / name)
    shutil.copy(uninterrupted.run_dir / "config.toml", run_dir)
    shutil.copy(uninterrupted.run_dir / "metrics.jsonl", run_dir)
    return run_dir


# ---- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "algorithm.entropy_ceof=0.3",
            "algorithm.entropy_ceof: unknown key; did you mean 'entropy_coef'? (override algorithm.entropy_ceof=...)",
        ),
        ("run.steps=ten", "run.steps: expected integer, got string 'ten' (override run.steps=ten)"),
        (
            "roles.actor.ranks=3",
            (
                "rollout.prompts: 8 x rollout.samples=4 / train.mini_batches=2 makes 16 samples per optimizer step, "
                "which do not divide evenly over roles.actor.ranks=3; use a multiple of 6, such as 12, or a number of "
                "ranks that divides 16"
            ),
        ),
        (
            "model={path='/no/model'}",
            "model.path: no directory '/no/model'; set it to a downloaded Hugging Face model directory",
        ),
        (
            "checkpoint.resume=/no/none",
            "checkpoint.resume: no directory '/no/none'; set 'never', 'auto', or a checkpoint's or a run's directory",
        ),
        (
            "data.source=no.jsonl",
            (
                "data.source: cannot read no.jsonl: No such file or directory; expected a .jsonl or .parquet "
                "file, a directory or a pattern of them, or a data set saved by `save_to_disk`"
            ),
        ),
        (
            "model.config.hiden_size=64",
            "model.config.hiden_size is not a field of a qwen3 config; did you mean 'hidden_size'?",
        ),
    ],
)
def test_a_setting_that_cannot_be_meant_is_one_line_before_any_process(
    refused: Callable[..., list[str]], override: str, line: str
) -> None:
    assert refused(override) == [line]


@pytest.mark.parametrize(
    ("override", "beginning", "advice"),
    [
        ("backend.name=fsbd", "backend.name: unknown backend 'fsbd'; installed: ", "; did you mean 'fsdp'?"),
        (
            "rollout.engine=transformer",
            "rollout.engine: unknown engine 'transformer'; installed: ",
            "; did you mean 'transformers'?",
        ),
        (
            "reward.name=exakt-match",
            "reward.name: unknown reward 'exakt-match'; built in: exact-match, position",
            "; did you mean 'exact-match'?",
        ),
        (
            "weights.transport=pigeon",
            "weights.transport: unknown transport 'pigeon'; installed: ",
            "collective, delta, disk, ipc",
        ),
        ("algorithm.loss=cliped", "algorithm.loss: unknown loss 'cliped'", "'clipped'?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    refused: Callable[..., list[str]], override: str, beginning: str, advice: str
) -> None:
    (line,) = refused(override)
    assert line.startswith(beginning) and line.endswith(advice)


def test_several_problems_are_told_at_once(refused: Callable[..., list[str]]) -> None:
    lines = refused("run.steps=ten", "rollout.temperature=0", "train.optimiser.lr=1")
    assert sorted(line.split(":")[0] for line in lines) == ["rollout.temperature", "run.steps", "train.optimiser"]


def test_a_run_directory_that_cannot_be_written_is_one_line(refused: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refused("run.dir=file/run") == [
        f"run.dir: cannot write to {tmp_path}/file/run ({tmp_path}/file: Not a directory); set another directory"
    ]


# ---- the data --------------------------------------------------------------------------------------------------------

SKIP = "data.refused='skip' leaves such rows out"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "data.source: data.jsonl is empty, expected one JSON object per line"),
        (
            '{"prompt": "1"}\n{"prompt": "2",}\n{"prompt": "3"}\n',
            "data.jsonl:2: not valid JSON: Illegal trailing comma before end of object, at character 15",
        ),
        (
            '{"prompt": "1"}\n\n["prompt"]\n',
            f"data.jsonl:3: got ['prompt'], expected a JSON object with the field 'prompt'; {SKIP}",
        ),
        (
            '{"prompt": "1"}\n{"promt": "2"}\n',
            f"data.jsonl:2: no field 'prompt'; it has: promt; did you mean 'promt'?; set data.prompt_key; {SKIP}",
        ),
        (
            '{"prompt": "1"}\n{"prompt": "2"}\n',
            "data.held_out=16 leaves nothing to train on: data.jsonl has 2 prompts; hold out fewer",
        ),
    ],
)
def test_a_data_set_that_cannot_be_used_is_one_line_that_names_the_line(
    refused: Callable[..., list[str]], tmp_path: Path, text: str, line: str
) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    (told,) = refused("data.source=data.jsonl")
    # What json says of a trailing comma differs between versions of Python.
    assert told == line if "trailing comma" not in line else told.startswith("data.jsonl:2: not valid JSON: ")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_run_is_not_trained_over_without_being_asked(
    refused: Callable[..., list[str]], uninterrupted: Finished, tmp_path: Path
) -> None:
    earlier = copy_of(uninterrupted, tmp_path, 2, 4)
    before = content(earlier)
    advice = "continue it with checkpoint.resume=auto, or set another run.dir"
    held = f"run.dir: {earlier} already holds a run (step-00000004); {advice}"
    assert refused(f"run.dir={earlier}") == [held]
    # Nor from an older checkpoint of its own, whose successors would be taken for newer ones, nor from another run's.
    assert refused(f"run.dir={earlier}", f"checkpoint.resume={earlier}/checkpoints/step-00000002") == [held]
    other = uninterrupted.run_dir / "checkpoints/step-00000006"
    assert refused(f"run.dir={earlier}", f"checkpoint.resume={other}") == [held]
    assert content(earlier) == before


def test_a_half_written_or_damaged_checkpoint_is_named_and_never_resumed(
    refused: Callable[..., list[str]], uninterrupted: Finished, tmp_path: Path
) -> None:
    earlier = copy_of(uninterrupted, tmp_path, 2, 4, 6)
    checkpoints = earlier / "checkpoints"
    damaged, torn = checkpoints / "step-00000004", checkpoints / "step-00000006"
    partial = (checkpoints / "step-00000002").rename(checkpoints / "step-00000002.partial")
    weights = damaged / "actor/rank-00001.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    (torn / "checkpoint.json").unlink()
    before = content(earlier)
    assert refused(f"checkpoint.resume={partial}") == [
        (
            f"checkpoint.resume: {partial} was never completed; resume from a checkpoint whose name does not end in "
            "'.partial'"
        )
    ]
    assert refused(f"checkpoint.resume={damaged}") == [
        (
            f"checkpoint.resume: {weights} has {size - 1} bytes instead of {size}; the checkpoint is damaged, so "
            "resume from another one"
        )
    ]
    assert refused(f"checkpoint.resume={torn}") == [
        (
            f"checkpoint.resume: {torn}/checkpoint.json is missing; the checkpoint is incomplete, so resume from "
            "another one"
        )
    ]
    assert content(earlier) == before


def test_a_checkpoint_of_another_model_or_of_other_data_is_refused(
    refused: Callable[..., list[str]], uninterrupted: Finished, tmp_path: Path
) -> None:
    earlier = copy_of(uninterrupted, tmp_path, 6)
    checkpoint, before = earlier / "checkpoints/step-00000006", content(earlier)
    advice = "resume with the [model] it was trained with, or start a new run in another run.dir"
    resume = [f"run.dir={earlier}", "checkpoint.resume=auto"]
    assert refused(*resume, "model.config.hidden_size=64") == [
        (
            f"checkpoint.resume: {checkpoint}/actor has [16, 32] for 'model.embed_tokens.weight', this run's actor "
            f"needs [16, 64]; {advice}"
        )
    ]
    assert refused(*resume, "model.config.num_hidden_layers=3") == [
        (
            f"checkpoint.resume: {checkpoint}/actor lacks 'model.layers.2.self_attn.q_proj.weight', this run's actor "
            f"needs [32, 32]; {advice}"
        )
    ]
    (line,) = refused(*resume, "run.seed=1")
    assert line == (
        "checkpoint.resume: the data are not the checkpoint's: run.seed is 1 (was 0); use the same [data] and "
        "run.seed, or set data.restart=true to begin these at their first prompt, with the checkpoint's weights, "
        "optimizer and step"
    )
    assert content(earlier) == before


# ---- the reward function, which only a run can try -------------------------------------------------------------------


def test_a_reward_that_is_nan_ends_the_run_with_the_sample_and_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)  # where the command finds the module
    changes = ["backend.name=plain", "roles.actor.ranks=1", "reward.name=my_rewards:to_nan"]
    changes += ["rollout.engine=fake", "algorithm.on_mismatch=off"]
    saved = ["checkpoint.every=1", "checkpoint.background=false", "run.dir=run", "reward.processes=1"]
    with Command("train", write_small(tmp_path), *changes, *saved, logs=tmp_path) as command:
        assert command.finish() == 2, command.err
        command.assert_nothing_is_left()
    (line,) = command.errors
    assert line.startswith("corerl: error: reward 'my_rewards:to_nan' returned nan, wanted a finite number, on prompt ")
    assert ">') with the response '" in line
    assert (command.out, steps_done(tmp_path / "run")) == ("", 1)
    assert latest(tmp_path / "run") == tmp_path / "run/checkpoints/step-00000001"
