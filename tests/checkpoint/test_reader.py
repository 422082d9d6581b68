from __future__ import annotations

from pathlib import Path

import pytest
import torch

from corerl.checkpoint.format import read_index
from corerl.checkpoint.reader import CheckpointSource, read_extra, written_ranks
from corerl.checkpoint.writer import stage, write
from corerl.errors import CheckpointError, ModelError
from corerl.weights.chunks import Chunk, fill
from tests.checkpoint.roles import KEYS, SHAPES, cut, whole


def save(directory: Path, world: int) -> None:
    for rank in range(world):
        write(stage(cut(rank, world, whole()), {"rank": rank}), directory, rank)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (2, 1), (1, 3), (3, 2)])
def test_any_number_of_ranks_reads_what_any_number_wrote_bit_for_bit(
    tmp_path: Path, writers: int, readers: int
) -> None:
    save(tmp_path, writers)
    for key in KEYS:
        for rank in range(readers):
            wanted = cut(rank, readers, whole())[key]
            chunks = cut(rank, readers, whole(seed=1))[key]
            source = CheckpointSource(tmp_path, key)
            fill(chunks, source, what="the checkpoint")
            for chunk, expected in zip(chunks, wanted, strict=True):
                assert torch.equal(chunk.view.view(torch.int32), expected.view.view(torch.int32))
            # exactly this rank's share, nothing around it
            assert source.bytes_read == sum(4 * chunk.view.numel() for chunk in chunks)


def test_the_source_lists_the_shapes_of_whole_tensors(tmp_path: Path) -> None:
    save(tmp_path, 2)
    source = CheckpointSource(tmp_path, "exp_avg")
    assert source.shapes == SHAPES and source.shape("norm") == (4,) and source.shape("other") is None


def test_each_ranks_extra_state_is_its_own(tmp_path: Path) -> None:
    save(tmp_path, 2)
    assert written_ranks(tmp_path) == 2
    assert [read_extra(tmp_path, rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(CheckpointError, match=r"rank-00002.json is missing"):
        read_extra(tmp_path, 2)


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    save(tmp_path, 1)
    source = CheckpointSource(tmp_path, "master")
    with pytest.raises(
        ModelError, match=r"the checkpoint has 'embed' with shape \[6, 4\], but the model needs \[8, 4\]"
    ):
        fill([Chunk("embed", (8, 4), (0, 0), (8, 4), torch.zeros(8, 4))], source, what="the checkpoint")


def test_an_unknown_key_is_answered_with_those_that_are_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="has no 'momentum'; it has exp_avg, exp_avg_sq, master"):
        CheckpointSource(tmp_path, "momentum")


def test_a_directory_without_a_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a role's part of a checkpoint"):
        CheckpointSource(tmp_path / "nothing", "master")


def test_what_retention_removes_while_it_is_read_is_told_as_removed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000040"
    role = checkpoint / "actor"
    save(role, 2)
    source = CheckpointSource(role, "master")
    checkpoint.rename(checkpoint.with_suffix(".partial"))
    told = (
        f"{checkpoint} was removed or replaced while it was being read: the run that writes there keeps only its "
        "newest checkpoints (checkpoint.keep); try again"
    )
    for read in (
        lambda: source.read("embed", (0, 0), (6, 4)),
        lambda: written_ranks(role),
        lambda: read_index(role, 0),
        lambda: read_extra(role, 0),
    ):
        with pytest.raises(CheckpointError) as error:
            read()
        assert error.value.message == told


def test_a_truncated_file_and_a_missing_rank_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    source = CheckpointSource(tmp_path, "master")
    source._boxes["embed"] = source._boxes["embed"][:1]
    with pytest.raises(CheckpointError, match=r"contains 12 of the 24 elements of 'embed'"):
        source.read("embed", (0, 0), (6, 4))
    file = tmp_path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors cannot be read"):
        CheckpointSource(tmp_path, "master").read("embed", (0, 0), (1, 4))
