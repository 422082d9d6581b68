from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from corerl.checkpoint import writer
from corerl.checkpoint.format import Checksum, checksum, read_index
from corerl.checkpoint.reader import CheckpointSource, read_extra, written_ranks
from corerl.checkpoint.writer import stage, write
from corerl.errors import CheckpointDamaged, CheckpointError
from corerl.weights.chunks import fill, intersect
from tests.checkpoint.changes import flip
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


def test_each_ranks_extra_state_is_its_own(tmp_path: Path) -> None:
    save(tmp_path, 2)
    assert written_ranks(tmp_path) == 2
    assert [read_extra(tmp_path, rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(CheckpointError, match=r"rank-00002.json is missing"):
        read_extra(tmp_path, 2)


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


# ---- integrity -------------------------------------------------------------------------------------------------------


def resume(directory: Path, rank: int, world: int) -> None:
    """Read a rank's part of each key, as a backend does."""
    for key in KEYS:
        source = CheckpointSource(directory, key)
        fill(cut(rank, world, whole(seed=1))[key], source, what="the checkpoint")
        source.verify(rank=rank, world_size=world)


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (1, 3), (3, 2)])
def test_one_flipped_bit_anywhere_is_found_by_a_rank_that_says_where(
    tmp_path: Path, writers: int, readers: int
) -> None:
    save(tmp_path, writers)
    for rank in range(readers):
        resume(tmp_path, rank, readers)
    for wrote in range(writers):
        file = tmp_path / f"rank-{wrote:05d}.safetensors"
        for saved in read_index(tmp_path, wrote).boxes:
            flip(file, saved.stored)
            found = {}
            for rank in range(readers):
                try:
                    resume(tmp_path, rank, readers)
                except CheckpointDamaged as error:
                    found[rank] = error.message
            flip(file, saved.stored)
            what = f"{file}: {saved.key!r} of {saved.name!r} is not what was saved (its checksum differs)"
            assert set(found.values()) == {f"{what}; resume from another checkpoint"}
            read_whole = {
                rank
                for rank in range(readers)
                for chunk in cut(rank, readers, whole())[saved.key]
                if chunk.name == saved.name and intersect(chunk.box, saved.box) == saved.box
            }
            assert read_whole <= set(found) and len(found) <= len(read_whole) + 1


def test_one_flipped_bit_of_the_extra_state_is_refused(tmp_path: Path) -> None:
    write(stage(cut(0, 1, whole()), {"rng": torch.arange(5, dtype=torch.uint8)}), tmp_path, 0)
    assert read_extra(tmp_path, 0)["rng"].tolist() == [0, 1, 2, 3, 4]
    flip(tmp_path / "rank-00000.safetensors", "extra/0", bit=0)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: 'extra/0' is not what was saved"):
        read_extra(tmp_path, 0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_with_the_tensors_name(
    tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = whole()
    tensors["master"]["q"][2, 1, 4] = value

    def blind(tensors: Mapping[str, torch.Tensor]) -> dict[str, Checksum]:
        return {name: (checksum(tensor)[0], True) for name, tensor in tensors.items()}

    monkeypatch.setattr(writer, "checksums", blind)  # `write` refuses them too
    write(stage(cut(0, 1, tensors), {}), tmp_path, 0)
    told = f"{tmp_path}/rank-00000.safetensors: 'master' of 'q' has NaN or infinite values; resume from a checkpoint of"
    with pytest.raises(CheckpointError, match=f"^{told} an earlier step$"):
        CheckpointSource(tmp_path, "master").read("q", (0, 0, 0), SHAPES["q"])
