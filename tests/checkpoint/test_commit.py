from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from corerl.checkpoint import commit as commit_module
from corerl.checkpoint.commit import begin, commit, latest, newest_intact, read_state, retain
from corerl.checkpoint.reader import CheckpointSource
from corerl.checkpoint.writer import stage, write
from corerl.errors import CheckpointDamaged, CheckpointError, SaveFailed
from corerl.weights.chunks import Chunk
from tests.checkpoint.roles import SHAPES, STATE, cut, whole


def save(run_dir: Path, step: int, *, world: int = 2, seed: int = 0) -> Path:
    partial = begin(run_dir, step)
    for rank in range(world):
        write(stage(cut(rank, world, whole(seed)), {}), partial / "actor", rank)
    return commit(partial, {**STATE, "rollout_step": step}, ranks={"actor": world})


def test_a_checkpoint_is_invisible_until_it_is_complete(tmp_path: Path) -> None:
    partial = begin(tmp_path, 50)
    for rank in range(2):
        write(stage(cut(rank, 2, whole()), {}), partial / "actor", rank)
        assert latest(tmp_path) is None
    path = commit(partial, STATE, ranks={"actor": 2})
    assert path == tmp_path / "checkpoints" / "step-00000050" == latest(tmp_path)
    assert not partial.exists()
    assert read_state(path) == STATE


def test_driver_files_are_synced_before_the_checkpoint_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = begin(tmp_path, 4)
    write(stage(cut(0, 1, whole()), {}), partial / "actor", 0)
    (partial / "step-00000004.npz").write_bytes(b"a batch in flight")
    synced = []

    def sync(path: Path) -> None:
        assert partial.exists()
        synced.append(path.name)

    monkeypatch.setattr(commit_module, "sync", sync)
    commit(partial, STATE, ranks={"actor": 1})
    assert "step-00000004.npz" in synced


def broken(run_dir: Path, change: str) -> Path:
    """A partial checkpoint of two ranks with one fault."""
    partial = begin(run_dir, 60)
    for rank in range(2):
        state = cut(rank, 2, whole())
        avg = state["exp_avg"]
        norm = next(i for i, chunk in enumerate(avg) if chunk.name == "norm")
        if rank == 1 and change == "dropped":
            del avg[norm]
        elif rank == 1 and change == "doubled":
            avg[norm] = Chunk("norm", (4,), (0,), (2,), torch.zeros(2))
        elif rank == 1 and change == "reshaped":
            avg[norm] = Chunk("norm", (5,), (2,), (2,), torch.zeros(2))
        elif change == "nowhere":
            state["exp_avg"] = [chunk for chunk in avg if chunk.name != "norm"]
        write(stage(state, {}), partial / "actor", rank)
    return partial


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dropped", r"actor: 2 elements of 'exp_avg' of 'norm', \[4\], are missing; correct"),
        ("doubled", r"actor: 2 elements of 'exp_avg' of 'norm', \[4\], are duplicated or out of place"),
        ("reshaped", r"actor: rank 1 saved 'norm' as part of \[5\], another rank as part of \[4\]"),
        ("nowhere", r"actor: 4 elements of 'exp_avg' of 'norm', \[4\], are missing"),
    ],
)
def test_a_checkpoint_that_does_not_hold_every_element_once_is_refused(
    tmp_path: Path, change: str, message: str
) -> None:
    earlier = save(tmp_path, 50)
    partial = broken(tmp_path, change)
    with pytest.raises(SaveFailed, match=message):
        commit(partial, STATE, ranks={"actor": 2})
    assert latest(tmp_path) == earlier


def test_a_buffer_has_no_moments_and_all_of_its_elements(tmp_path: Path) -> None:
    bias = torch.arange(3.0)

    def saved(step: int, *buffers: Chunk) -> Path:
        partial = begin(tmp_path, step)
        state = {"buffer": list(buffers), **cut(0, 1, whole())}
        write(stage(state, {}), partial / "actor", 0)
        return commit(partial, STATE, ranks={"actor": 1})

    source = CheckpointSource(saved(1, Chunk("bias", (3,), (0,), (3,), bias)) / "actor", "master", "buffer")
    assert source.shapes.keys() == {*SHAPES, "bias"}
    assert torch.equal(source.read("bias", (0,), (3,)), bias)
    with pytest.raises(SaveFailed, match=r"actor: 1 elements of 'buffer' of 'bias', \[3\], are missing"):
        saved(2, Chunk("bias", (3,), (0,), (2,), bias[:2]))


def test_a_rank_or_role_that_did_not_write_is_refused(tmp_path: Path) -> None:
    partial = begin(tmp_path, 1)
    write(stage(cut(0, 1, whole()), {}), partial / "actor", 0)
    with pytest.raises(
        SaveFailed, match="actor/rank-00001.safetensors is missing, although rank 1 .* a directory that all nodes share"
    ):
        commit(partial, STATE, ranks={"actor": 2})
    with pytest.raises(SaveFailed, match="critic/rank-00000.safetensors is missing"):
        commit(partial, STATE, ranks={"actor": 1, "critic": 1})
    assert latest(tmp_path) is None


def test_a_state_that_json_cannot_hold_fails_the_save(tmp_path: Path) -> None:
    partial = begin(tmp_path, 1)
    write(stage(cut(0, 1, whole()), {}), partial / "actor", 0)
    with pytest.raises(SaveFailed, match="not JSON serializable"):
        commit(partial, {"position": {1, 2}}, ranks={"actor": 1})
    assert latest(tmp_path) is None


def test_what_cannot_be_resumed_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint at {tmp_path / 'nowhere'}"):
        read_state(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="was never completed"):
        read_state(begin(tmp_path, 3))
    path = save(tmp_path, 5)
    with pytest.raises(
        CheckpointError, match=f"{tmp_path} is a run directory, not .*; use one of those in {path.parent}$"
    ):
        read_state(tmp_path)
    (path / "actor" / "rank-00001.json").unlink()
    with pytest.raises(CheckpointError, match=r"actor/rank-00001.json is missing; the checkpoint is damaged"):
        read_state(path)
    (path / "checkpoint.json").write_text('{"format": "corerl-checkpoint-1"}')
    with pytest.raises(CheckpointError, match="has format 'corerl-checkpoint-1', but this .* 'corerl-checkpoint-2'"):
        read_state(path)
    (path / "checkpoint.json").write_text('{"format"')
    with pytest.raises(CheckpointError, match=r"checkpoint.json cannot be read"):
        read_state(path)
    (path / "checkpoint.json").write_text('{"format": "corerl-checkpoint-2"}')
    with pytest.raises(CheckpointDamaged, match=r"checkpoint.json is not what was saved"):
        read_state(path)
    (path / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint.json is missing"):
        read_state(path)


def test_a_directory_that_is_no_checkpoint_is_named_for_what_it_is(tmp_path: Path) -> None:
    run = tmp_path / "runs/first"
    save(run, 40)
    damaged = save(run, 50)
    (damaged / "actor/rank-00001.json").unlink()
    model, empty, best = run / "model", tmp_path / "empty", save(tmp_path / "other", 5).rename(tmp_path / "best")
    kept = save(tmp_path / "kept", 5)
    (best / "checkpoint.json").unlink()
    for directory in (model, empty):
        directory.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model-00001-of-00002.safetensors").touch()
    for directory, told in {
        model: "is a model, not a checkpoint; to train or evaluate it, set model.path to it in a config file",
        empty: "is not a checkpoint; use a directory such as .../checkpoints/step-00000050",
        best: "/checkpoint.json is missing; the checkpoint is incomplete",
        kept.with_name("step-00000004"): f"still exists, such as {kept}",  # it was removed
    }.items():
        with pytest.raises(CheckpointError, match=f"{directory}.*{re.escape(told)}"):
            read_state(directory)


def test_a_commit_that_is_tried_again_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = begin(tmp_path, 2)
    write(stage(cut(0, 1, whole()), {}), partial / "actor", 0)
    replace, refused = os.replace, []

    def once(source: Path, target: Path) -> None:
        if Path(source) == partial and not refused:
            refused.append(source)
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(SaveFailed, match="Input/output error"):
        commit(partial, {"rollout_step": 2}, ranks={"actor": 1})
    assert refused
    path = commit(partial, {"rollout_step": 2, "more": "than before"}, ranks={"actor": 1})
    assert latest(tmp_path) == path and read_state(path)["more"] == "than before"


def test_nothing_is_removed_beside_one_that_cannot_be_resumed(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / "actor/rank-00001.json").unlink()
    (line,) = retain(tmp_path, 1, committed=newest)
    assert (
        line.startswith("no old checkpoint was removed, because step-00000002 cannot be resumed: ")
        and latest(tmp_path) == older
    )


def test_what_cannot_be_removed_is_told_and_the_others_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, newest = (save(tmp_path, step) for step in (1, 2, 3))
    replace = os.replace

    def refusing(source: Path, target: Path) -> None:
        if source == second:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    assert retain(tmp_path, 1, committed=newest) == [f"{second} could not be removed: Directory not empty"]
    assert not first.exists() and latest(tmp_path) == newest


@pytest.mark.parametrize(("keep", "left"), [(2, [30, 32]), (0, [20, 30, 32, 35])])
def test_what_could_not_be_resumed_takes_no_place_among_those_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    first, second = save(tmp_path, 20), save(tmp_path, 30)
    damaged = save(tmp_path, 35)
    tensors = damaged / "actor/rank-00000.safetensors"
    tensors.write_bytes(tensors.read_bytes().replace(b"master", b"mistre", 1))  # as long as before
    assert newest_intact(tmp_path)[0] == second
    said = retain(tmp_path, keep, committed=save(tmp_path, 32))
    removed = "step-00000035 is removed: the run has gone back before it, and now has step-00000032"
    assert said == ([removed] if keep else [])
    assert sorted((tmp_path / "checkpoints").iterdir()) == [first.with_name(f"step-{step:08d}") for step in left]


SUMMED = {"checkpoint.json": b"something", "step-00000009.npz": b"batch"}  # file -> what is changed in it


@pytest.mark.parametrize("name", [*SUMMED, "actor/rank-00001.json", "actor/rank-00000.safetensors"])
def test_one_changed_byte_of_a_driver_file_is_found(tmp_path: Path, name: str) -> None:
    older, partial = save(tmp_path, 5), begin(tmp_path, 9)
    for rank in range(2):
        write(stage(cut(rank, 2, whole()), {}), partial / "actor", rank)
    (partial / "step-00000009.npz").write_bytes(b"a batch in flight")
    newest = commit(partial, {**STATE, "told": "something"}, ranks={"actor": 2})
    file = newest / name
    content = file.read_bytes()
    at = content.index(SUMMED.get(name, b"master"))
    file.write_bytes(content[:at] + b"z" + content[at + 1 :])
    told = f"{file} is not what was saved (its checksum differs); resume from another checkpoint"
    with pytest.raises(CheckpointDamaged) as caught:
        read_state(newest)
    assert caught.value.message == told
    assert newest_intact(tmp_path) == (older, {newest: told})
