"""What breaks around a run: files, disks, machines, other runs, rewards. One line each, and earlier results stay."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from corerl.checkpoint.commit import latest, read_state
from corerl.cli.main import main
from corerl.driver.run_dir import occupied
from corerl.rollout.recorded import read_rollout, saved_rollouts
from corerl.rollout.rewards.base import short
from tests.cluster.nodes import cluster
from tests.cluster.test_runtime import closed_port
from tests.driver.saved import make_config, make_model, save
from tests.end_to_end.command import Command, content, metrics, steps_done, write_small
from tests.end_to_end.faulty import fault
from tests.end_to_end.user_functions import kind, unreliable
from tests.machine import paced

FUNCTIONS = "tests.end_to_end.user_functions"
CONSOLE = "extensions=[{name='jsonl'},{name='console'}]"
FAKE = ["rollout.engine=fake", "algorithm.on_mismatch=off", "eval.every=0"]
PLAIN = ["backend.name=plain", "roles.actor.ranks=1", *FAKE]  # the processes that start fastest
EMBEDDING = "model.embed_tokens.weight"


# ---- a model's files -------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    config = make_config()
    make_model(config, seed=0).save_pretrained(tmp_path / "model")
    capsys.readouterr()  # how far transformers has got with that
    return tmp_path / "model"


def damage(file: Path, how: str) -> None:
    """Spoil a safetensors file."""
    whole, tensors = file.read_bytes(), load_file(file)
    header = int.from_bytes(whole[:8], "little")
    match how:
        case "cut":
            file.write_bytes(whole[: len(whole) // 2])
        case "cut in its header":
            file.write_bytes(whole[: header // 2])
        case "empty":
            file.write_bytes(b"")
        case "header":
            file.write_bytes(whole[:8] + b"\xff" * header + whole[8 + header :])
        case "lacks":
            del tensors[EMBEDDING]
            save_file(tensors, file, metadata={"format": "pt"})
        case "shape":
            tensors[EMBEDDING] = torch.zeros(16, 48)
            save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("cut", "is damaged: .*incomplete metadata.*; download or save it again"),
        ("cut in its header", "is damaged: .*; download or save it again"),
        ("empty", "is damaged: .*; download or save it again"),
        ("header", "is damaged: .*; download or save it again"),
        ("lacks", rf"lacks '{EMBEDDING}', but its config.json needs \[16, 32\]: .*; download or save them again"),
        ("shape", rf"has \[16, 48\] for '{EMBEDDING}', but its config.json needs \[16, 32\]: .* or save them again"),
    ],
)
def test_a_damaged_model_file_is_named_before_any_process(
    refused: Callable[..., list[str]], model: Path, how: str, what: str
) -> None:
    damage(model / "model.safetensors", how)
    (line,) = refused(f"model={{path='{model}',tokenizer='characters:0123456789>s'}}")
    assert re.fullmatch(rf"model.path: {model}/model.safetensors {what}", line)


def test_a_model_whose_part_is_missing_or_damaged_is_named(refused: Callable[..., list[str]], model: Path) -> None:
    names, part = list(load_file(model / "model.safetensors")), model / "part-2.safetensors"
    # A model.safetensors would be read in place of what an index beside it lists.
    (model / "model.safetensors").rename(model / "part-1.safetensors")
    index = {name: part.name if name == EMBEDDING else "part-1.safetensors" for name in names}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    given = f"model={{path='{model}',tokenizer='characters:0123456789>s'}}"
    assert refused(given) == [f"model.path: {part} is missing, although model.safetensors.index.json lists it"]
    part.write_bytes(b"\x00" * 100)
    (line,) = refused(given)
    assert line.startswith(f"model.path: {part} is damaged: ")


# ---- the disk --------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_ends_the_run_with_path_and_cause_and_the_next_one_goes_on_from_what_is_there(
    tmp_path: Path,
) -> None:
    run_dir, checkpoints = tmp_path / "run", tmp_path / "run/checkpoints"
    arguments = ["train", write_small(tmp_path), f"run.dir={run_dir}", *FAKE, "checkpoint.every=1", CONSOLE]

    with Command(
        *arguments, "checkpoint.background=false", *fault("save", "full", step=2), logs=tmp_path
    ) as foreground:
        assert foreground.finish() == 1, foreground.err
        foreground.assert_nothing_is_left()
    written = rf"cannot write {checkpoints}/step-\d+.partial/actor/rank-00001.safetensors: .*File too large.*"
    error = rf"{written}; complete checkpoints are untouched\n"
    # How many optimizer steps it is at is said where a rank is asked to save, not where it is asked what it has saved.
    who = r"corerl: error: (actor rank 1: (save|saved)( at optimizer step \d)?: )?"
    assert re.fullmatch(f"{who}{error}", foreground.err)
    assert "step-00000002" in foreground.err
    assert latest(run_dir) == checkpoints / "step-00000001"
    assert [path.name for path in sorted(checkpoints.glob("step-*")) if not path.suffix] == ["step-00000001"]
    first = content(checkpoints / "step-00000001")

    with Command(*arguments, "checkpoint.resume=auto", *fault("save", "full", step=3), logs=tmp_path) as background:
        assert background.finish() == 1, background.err
        background.assert_nothing_is_left()
    assert "resumed after step 1 of 6" in background.out.splitlines()
    assert re.fullmatch(f"{who}the background save failed: {error}", background.err)
    assert "step-00000003" in background.err
    assert latest(run_dir) == checkpoints / "step-00000002"
    assert read_state(checkpoints / "step-00000002")["rollout_step"] == 2
    assert content(checkpoints / "step-00000001") == first


# ---- another run, and the end of this one ----------------------------------------------------------------------------


def test_a_second_run_in_one_directory_is_refused_and_a_killed_one_leaves_it_free_with_no_process_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, config = tmp_path / "run", write_small(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that what the second run puts there goes again
    # In the background, its first checkpoint might not be there yet when it waits in its fourth step.
    endless = ["run.steps=100000", "checkpoint.background=false", f"reward.name={FUNCTIONS}:constant", CONSOLE, *FAKE]
    with Command(
        *("train", config, f"run.dir={run_dir}", *endless, *fault("optimizer_step", "wait", step=3)),
        logs=tmp_path,
        own_ray=True,
    ) as first:
        first.until((run_dir / "fault").exists, "in its fourth step")
        assert latest(run_dir) is not None
        (note,) = [line for line in first.out.splitlines() if line.startswith("note: ")]
        assert note.startswith("note: nearly all groups had equal rewards, 3 steps in a row, now ")
        before = content(run_dir)
        for own, told in (
            ("checkpoint.resume=auto", f"another run is writing to {run_dir}; set another directory, or wait for "),
            ("checkpoint.resume=never", f"{run_dir} already holds a run (step-00000002); continue it with "),
        ):
            assert main(["train", str(config), f"run.dir={run_dir}", "run.steps=9", *FAKE, own]) == 2
            out, err = capsys.readouterr()
            (line,) = err.splitlines()
            assert out == "" and line.startswith(f"corerl: error: run.dir: {told}")
        assert content(run_dir) == before

        (run_dir / "go").touch()
        first.until(lambda: steps_done(run_dir) >= 6, "two steps further")
        lines = list(first.processes().values())
        assert sum(line.startswith("ray::Process") for line in lines) == 3  # two ranks and an engine
        assert sum("multiprocessing.spawn" in line for line in lines) == 2  # of the reward
        assert any("gcs_server" in line for line in lines) and any("raylet" in line for line in lines)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.finish() == -signal.SIGKILL
        with occupied(run_dir):
            first.assert_nothing_is_left()
    newest = latest(run_dir)
    assert newest is not None and read_state(newest)["rollout_step"] >= 2


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_a_reward_that_fails_on_some_samples_is_counted_and_told_once_a_step_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    steps, failed_value = 2, -1.0
    reward = [f"reward.name={FUNCTIONS}:unreliable", "reward.timeout=0.5", f"reward.failed_value={failed_value}"]
    run = [f"run.dir={tmp_path}/run", f"run.steps={steps}", "rollout.save=true", CONSOLE]
    with Command("train", write_small(tmp_path), *PLAIN, *run, *reward, logs=tmp_path) as command:
        assert (command.finish(), command.err) == (0, "")
        command.assert_nothing_is_left()

    told = {line["step"]: line for line in metrics(tmp_path / "run") if "train/loss" in line}
    notes = [line for line in command.out.splitlines() if line.startswith("note: ")]
    kinds: Counter[int] = Counter()
    for step, path in enumerate(saved_rollouts(tmp_path / "run/rollouts")):
        scored = read_rollout(path)
        each = list(map(kind, scored.rollout.texts))
        wanted = [
            failed_value if of < 3 else unreliable(scored.rollout.prompts[group], text)
            for of, group, text in zip(each, scored.rollout.batch.rows["group"], scored.rollout.texts, strict=True)
        ]
        np.testing.assert_array_equal(scored.rewards, np.array(wanted, dtype=np.float32))
        failed = sum(of < 3 for of in each)
        assert told[step]["rollout/failed"] == failed > 0
        assert told[step]["rollout/reward"] == pytest.approx(np.mean(wanted))
        beginning = f"note: step {step}: {failed} samples failed; the first: reward '{FUNCTIONS}:unreliable' "
        assert sum(line.startswith(beginning) for line in notes) == 1
        kinds.update(each)
    assert len(notes) == len(told) == steps
    assert all(kinds[of] for of in range(3))  # each kind of failure has been there
    assert latest(tmp_path / "run") == tmp_path / f"run/checkpoints/step-{steps:08d}"


# A third of the limit would pass before there are further processes, which is tested with the pool.
AT_ONCE = """
from corerl.rollout.rewards import pool
pool.HUNG = 0.02
"""


def test_samples_whose_reward_hangs_cost_their_batch_one_time_limit_and_are_told(tmp_path: Path) -> None:
    limit, begun = paced(4.0), tmp_path / "begun"
    begun.mkdir()
    name = "tests.rollout.user_rewards:hangs_at_first"  # whose processes start in a moment: they import no torch
    reward = [f"reward.name={name}", f"reward.options={{directory='{begun}',count=8}}", f"reward.timeout={limit}"]
    run = [f"run.dir={tmp_path}/run", "run.steps=2", "rollout.save=true", "reward.failed_value=-1.0", CONSOLE]
    with Command("train", write_small(tmp_path), *PLAIN, *run, *reward, logs=tmp_path, before=AT_ONCE) as command:
        assert (command.finish(), command.err) == (0, "")
        command.assert_nothing_is_left()

    began = [path.stat().st_mtime for path in begun.iterdir()]
    assert len(began) == 8 and max(began) - min(began) < 2 * limit  # in two processes alone, it would be three limits
    scored = [read_rollout(path) for path in saved_rollouts(tmp_path / "run/rollouts")]
    first = scored[0].rollout
    lost = scored[0].rewards == -1.0
    lengths = np.array([len(text) / 8 for text in first.texts], dtype=np.float32)
    np.testing.assert_array_equal(scored[0].rewards, np.where(lost, np.float32(-1.0), lengths))
    assert [int((each.rewards == -1.0).sum()) for each in scored] == [8, 0]
    row = int(np.flatnonzero(lost)[0])
    prompt = first.prompts[first.batch.rows["group"][row]]
    assert (
        f"note: step 0: 8 samples failed; the first: reward {name!r} took longer than reward.timeout={limit:g} seconds "
        f"on prompt {prompt.index} ({short(prompt.text)}) with the response {short(first.texts[row])}"
    ) in command.out


# ---- the cluster -----------------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The directory of a run with a checkpoint."""
    config = make_config()
    return save(tmp_path / "run", config, make_model(config, seed=1), step=2).parents[1]


def go_on(earlier: Path, status: int, *arguments: str, before: str = "") -> str:
    """Resume, in vain; what was there is there, and no process is. Returns the one line of the error."""
    found = content(earlier / "checkpoints")
    overrides = [f"run.dir={earlier}", "checkpoint.resume=auto", *FAKE, *arguments]
    with Command("train", write_small(earlier), *overrides, logs=earlier, before=before, own_ray=True) as command:
        assert command.finish() == status, command.err
        command.assert_nothing_is_left()
    assert command.out == ""
    assert content(earlier / "checkpoints") == found
    (line,) = command.errors
    return line.removeprefix("corerl: error: ")


def test_ray_that_cannot_start_is_one_line(earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    line = go_on(earlier, 1)
    assert line.startswith(f"cannot start Ray on this machine: [Errno 20] Not a directory: '{tmp_path}/file/ray'; ")


def test_ports_that_others_have_taken_do_not_matter(tmp_path: Path) -> None:
    # Ray's of its server, clients, dashboard and agents; and torch's.
    with contextlib.ExitStack() as stack:
        for port in (6379, 10001, 8265, 52365, 29400, 29500, 29501):
            taken = stack.enter_context(socket.socket())
            try:
                taken.bind(("", port))
            except OSError:
                continue  # somebody else has it: taken all the same
            taken.listen()
        options = [f"run.dir={tmp_path}/run", "run.steps=2", "eval.every=0"]
        with Command("train", write_small(tmp_path), *options, logs=tmp_path, own_ray=True) as command:
            assert command.finish() == 0, command.err
            command.assert_nothing_is_left()
    assert steps_done(tmp_path / "run") == 2


def test_an_address_where_nobody_listens_is_one_line(earlier: Path) -> None:
    address = f"127.0.0.1:{closed_port()}"
    line = go_on(earlier, 2, f"cluster.address={address}")
    assert line.startswith(f"cluster.address: no Ray cluster at '{address}' ([Errno 111] Connection refused); ")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of one CPU, whose disk counts as full: its object store overflows to nowhere."""
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    with cluster(node, RAY_local_fs_capacity_threshold="0.0001") as address:
        yield address


def test_too_few_resources_are_said_with_what_is_there_and_what_is_asked(address: str, earlier: Path) -> None:
    hurry = "from corerl.driver import launch; launch.RESERVED_WITHIN = 2.0"
    line = go_on(earlier, 1, f"cluster.address={address}", before=hurry)
    assert line == (
        "the cluster has no room for 2 bundles of {'CPU': 1.0}: CPU 1 free of 1, 2 needed; "
        "use fewer ranks or engines, or a larger cluster"
    )


def test_an_object_store_that_others_have_filled_is_one_line(address: str, tmp_path: Path) -> None:
    saved = ["checkpoint.every=1", "checkpoint.background=false", f"run.dir={tmp_path}/run"]
    filled = [f"cluster.address={address}", f"rollout.postprocess={FUNCTIONS}:fill_store"]
    with Command("train", write_small(tmp_path), *PLAIN, *saved, *filled, logs=tmp_path, own_ray=True) as command:
        assert command.finish() == 1, command.err
        command.assert_nothing_is_left()
    (line,) = command.errors
    assert line.startswith(
        "corerl: error: Ray's object store has no room for 0 MiB: the cluster's stores have 100 MiB in total, and the "
    )
    assert latest(tmp_path / "run") == tmp_path / "run/checkpoints/step-00000001"
