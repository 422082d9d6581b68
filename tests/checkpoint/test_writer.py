from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from corerl.checkpoint.reader import read_extra
from corerl.checkpoint.writer import BackgroundWriter, rooms, stage, write
from corerl.errors import SaveFailed
from corerl.weights.chunks import Chunk
from tests.checkpoint.roles import cut, whole


@pytest.mark.parametrize("sizes", [[], [0, 4], [4, 400, 256, 132, 1000, 12, 260, 0, 508], [2100, 300, 300, 300, 300]])
def test_staging_memory_is_cut_from_few_blocks(sizes: list[int]) -> None:
    blocks: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        blocks.append(torch.zeros(nbytes, dtype=torch.uint8))
        return blocks[-1]

    found = rooms(sizes, block_bytes=512, allocate=allocate)
    assert [len(room) for room in found] == sizes
    for room in found:
        room.add_(1)
        assert room.storage_offset() % 4 == 0
    assert sum(int(block.sum()) for block in blocks) == sum(sizes) and all(int(block.max()) <= 1 for block in blocks)
    assert all(len(block).bit_count() == 1 for block in blocks)
    # No more than one block is not filled, but for what no tensor is small enough to fill.
    assert sum(map(len, blocks)) <= 2 * sum(sizes) + 4


def test_values_are_stored_as_float32_and_replicas_are_left_out(tmp_path: Path) -> None:
    chunks = [
        Chunk("w", (4, 2), (2, 0), (2, 2), torch.full((2, 2), 0.5, dtype=torch.bfloat16)),
        Chunk("b", (2,), (0,), (2,), torch.zeros(2), replica=True),
    ]
    staged = stage({"exp_avg": chunks}, {})
    written = write(staged, tmp_path, 3)
    stored = load_file(tmp_path / "rank-00003.safetensors")
    assert list(stored) == ["exp_avg/w@2,0"]
    assert stored["exp_avg/w@2,0"].dtype == torch.float32 and stored["exp_avg/w@2,0"].tolist() == [[0.5] * 2] * 2
    assert staged.bytes == 16
    assert written == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "rank-00003.json").read_text())["boxes"] == [
        {"key": "exp_avg", "name": "w", "shape": [4, 2], "offsets": [2, 0], "sizes": [2, 2], "stored": "exp_avg/w@2,0"}
    ]


def test_extra_state_comes_back_as_it_was(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "adam_step": 3,
        "scale": 0.1,
        "name": "x",
        "nothing": None,
        "rank/rng": torch.tensor([1, 2], dtype=torch.uint8),
        "nested": {"list": [1, {"t": torch.tensor(0.25, dtype=torch.bfloat16)}]},
    }
    write(stage({}, extra), tmp_path, 0)
    read = read_extra(tmp_path, 0)
    assert {name: read[name] for name in ("adam_step", "scale", "name", "nothing")} == {
        "adam_step": 3,
        "scale": 0.1,
        "name": "x",
        "nothing": None,
    }
    assert torch.equal(read["rank/rng"], extra["rank/rng"])
    assert read["nested"]["list"][0] == 1
    assert torch.equal(read["nested"]["list"][1]["t"], extra["nested"]["list"][1]["t"])


def test_an_object_in_the_extra_state_is_refused_by_its_place() -> None:
    with pytest.raises(SaveFailed, match=r"extra\['a'\]\[1\] is a set; a checkpoint can contain only plain data"):
        stage({}, {"a": [1, {2}]})


def test_a_box_that_one_rank_holds_twice_is_refused() -> None:
    chunk = Chunk("w", (2,), (0,), (2,), torch.ones(2))
    with pytest.raises(SaveFailed, match="two chunks of this rank contain 'master/w@0'"):
        stage({"master": [chunk, chunk]}, {})


def test_a_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if target.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SaveFailed, match="No space left on device; .* GiB free in .*; complete checkpoints are unt"):
        write(stage(cut(0, 1, whole()), {}), tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("key", ["master", "exp_avg"])
def test_values_that_are_not_finite_are_not_written(tmp_path: Path, key: str, value: float) -> None:
    sound, broken = (Chunk(name, (2,), (0,), (2,), torch.tensor([1.0, 1.0])) for name in ("k", "q"))
    broken.view[1] = value
    with pytest.raises(SaveFailed, match=f"^'{key}' of 'q' has NaN or infinite values, so nothing is saved; complete"):
        write(stage({key: [sound, broken]}, {}), tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("look", ["submit", "wait", "idle", "close"])
def test_a_background_failure_is_raised_once_by_the_next_call(look: str) -> None:
    writer = BackgroundWriter()
    done: list[int] = []

    def fails() -> None:
        raise OSError("disk full")

    writer.submit(fails)
    while writer._last is None or not writer._last.done():
        pass
    with pytest.raises(SaveFailed, match="the background save failed: OSError: disk full"):
        writer.submit(lambda: done.append(1)) if look == "submit" else getattr(writer, look)()
    assert done == []
    writer.submit(lambda: done.append(2))
    writer.wait()
    assert done == [2]
