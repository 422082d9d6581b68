from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from attrs import define, field
from safetensors.torch import load, load_file

from corerl.checkpoint.copies import CopyingFromGpu, Pair, StateCopies
from corerl.checkpoint.format import read_index
from corerl.checkpoint.reader import CheckpointSource, read_extra
from corerl.checkpoint.writer import stage, write
from corerl.errors import SaveFailed
from corerl.weights.chunks import Chunk
from tests.checkpoint.endless import require_newest_of_killed
from tests.checkpoint.roles import cut, whole

CPU = torch.device("cpu")
EXTRA = {
    "step": 3,
    "rng": torch.arange(5, dtype=torch.uint8),
    "seen": torch.tensor([2**40, 7]),
    "scale": torch.tensor(0.5, dtype=torch.bfloat16),
}


@define
class Held:
    """Copies when somebody waits for it, or `done` is called: until then it would still read."""

    pairs: list[Pair] = field(factory=list)
    waits: int = 0

    def begin(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        self.pairs = list(pairs)
        return self.wait

    def wait(self) -> None:
        self.waits += 1
        for target, source in self.pairs:
            target.copy_(source)
        self.pairs = []


def filled(value: float) -> dict[str, list[Chunk]]:
    tensors = {key: {name: torch.full_like(each, value) for name, each in of.items()} for key, of in whole().items()}
    return cut(0, 2, tensors)


def test_a_copy_holds_what_a_save_holds(tmp_path: Path) -> None:
    copies = StateCopies(CPU)
    for rank in range(2):
        state = cut(rank, 2, whole())
        write(stage(state, EXTRA), tmp_path / "saved", rank)
        nbytes = copies.begin(tmp_path / "copied", rank, state, EXTRA)
        assert copies.complete(wait=True)
        saved, copied = (tmp_path / each / f"rank-{rank:05d}.safetensors" for each in ("saved", "copied"))
        assert copied.stat().st_size == nbytes
        wanted, found = load_file(saved), load_file(copied)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert read_index(tmp_path / "copied", rank) == read_index(tmp_path / "saved", rank)
        extra = read_extra(tmp_path / "copied", rank)
        assert extra["step"] == 3 and all(torch.equal(extra[name], EXTRA[name]) for name in ("rng", "seen", "scale"))
    copies.close()


def test_the_files_of_the_copy_before_last_are_written_over_and_hold_their_own_step(tmp_path: Path) -> None:
    copies = StateCopies(CPU)
    inodes = []
    for step in range(1, 6):
        directory = tmp_path / f"step-{step}"
        if step > 2:
            (tmp_path / f"step-{step - 2}").rename(directory)
        copies.begin(directory, 0, filled(float(step)), {"step": step})
        copies.complete(wait=True)
        inodes.append((directory / "rank-00000.safetensors").stat().st_ino)
        for held in (step, step - 1) if step > 1 else (step,):
            found = load_file(tmp_path / f"step-{held}/rank-00000.safetensors")
            assert len(found) > 9 and all(bool((each == held).all()) for each in found.values())
            assert read_extra(tmp_path / f"step-{held}", 0) == {"step": held}
    assert inodes == [inodes[0], inodes[1]] * 2 + [inodes[0]] and inodes[0] != inodes[1]
    assert len(copies._mapped) == 2
    copies.close()


def test_other_ranks_write_over_the_files_of_those_before_if_they_have_their_size(tmp_path: Path) -> None:
    file, state = tmp_path / "rank-00000.safetensors", filled(2.0)
    smaller = {"master": filled(3.0)["master"]}
    with contextlib.ExitStack() as stack:
        held = []  # an open file keeps its number
        for given in (filled(1.0), state, smaller):
            copies = StateCopies(CPU)
            copies.begin(tmp_path, 0, given, {})
            copies.close()
            held.append(stack.enter_context(file.open("rb")))
        assert os.path.sameopenfile(held[0].fileno(), held[1].fileno())
        # Of another size it is another file: the one before stays whole for whoever still has it mapped.
        assert not os.path.sameopenfile(held[1].fileno(), held[2].fileno())
        before = load(held[1].read())
    assert before.keys() == stage(state, {}).tensors.keys() and all(
        bool((each == 2.0).all()) for each in before.values()
    )
    after = load_file(file)
    assert after.keys() == stage(smaller, {}).tensors.keys() and all(
        bool((each == 3.0).all()) for each in after.values()
    )


def test_memory_of_files_that_were_removed_is_given_back_before_new_ones_are_made(tmp_path: Path) -> None:
    copies = StateCopies(CPU)
    for step in range(3):
        copies.begin(tmp_path / str(step), 0, filled(1.0), {})
        copies.complete(wait=True)
        for file in (tmp_path / str(step)).iterdir():
            file.unlink()
    assert len(copies._mapped) == 1
    copies.close()


def test_who_waits_for_a_copy_whose_files_were_removed_gets_their_memory_back(tmp_path: Path) -> None:
    release = threading.Event()

    def later(job: Callable[[], object]) -> None:
        release.wait(60)
        job()

    copies = StateCopies(CPU, run=later)
    copies.begin(tmp_path / "1", 0, filled(1.0), {})
    descriptors = [each.descriptor for each in copies._mapped]
    shutil.rmtree(tmp_path / "1")
    assert not copies.complete(wait=False) and len(copies._mapped) == 1  # it is still written to
    release.set()
    with pytest.raises(SaveFailed, match="No such file"):  # there is no place for the index
        copies.complete(wait=True)
    assert copies._mapped == [] and len(descriptors) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    copies.close()


def test_from_its_first_byte_to_its_last_a_copy_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    release, entered = threading.Event(), threading.Event()

    def held(job: Callable[[], object]) -> None:
        entered.set()
        release.wait(60)
        job()

    copies = StateCopies(CPU, run=held)
    release.set()
    copies.begin(tmp_path, 0, filled(1.0), {})
    copies.complete(wait=True)
    release.clear()
    entered.clear()
    copies.begin(tmp_path, 0, filled(2.0), {})
    assert entered.wait(60)
    assert not copies.complete(wait=False)
    assert [each.name for each in tmp_path.iterdir()] == ["rank-00000.safetensors"]
    release.set()
    copies.close()
    assert read_index(tmp_path, 0).sums.keys() == load_file(tmp_path / "rank-00000.safetensors").keys()


def test_what_is_still_read_is_waited_for_before_it_may_change_and_before_it_is_summed(tmp_path: Path) -> None:
    copying, state, release = Held(), filled(1.0), threading.Event()

    def later(job: Callable[[], object]) -> None:
        release.wait(60)
        job()

    copies = StateCopies(CPU, copying=copying, run=later)
    copies.begin(tmp_path, 0, state, {})
    assert (len(copying.pairs), copying.waits) == (len([each for chunks in state.values() for each in chunks]) - 3, 0)
    copies.settle()
    assert (copying.pairs, copying.waits) == ([], 1)
    copies.settle()
    assert copying.waits == 1  # there is nothing to wait for any more
    for chunks in state.values():
        for chunk in chunks:
            chunk.view.fill_(-1.0)
    release.set()
    copies.close()
    source = CheckpointSource(tmp_path, "master")
    assert torch.equal(source.read("embed", (0, 0), (3, 4)), torch.ones(3, 4))


def test_it_is_summed_once_it_is_copied_also_if_nobody_else_waits(tmp_path: Path) -> None:
    copies = StateCopies(CPU, copying=(copying := Held()))
    copies.begin(tmp_path, 0, filled(4.0), {})
    copies.complete(wait=True)
    assert copying.pairs == []
    assert CheckpointSource(tmp_path, "exp_avg").read("norm", (0,), (2,)).tolist() == [4.0, 4.0]
    copies.close()


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_values_that_are_not_finite_make_no_copy_and_the_next_one_is_made(tmp_path: Path, value: float) -> None:
    copies, state = StateCopies(CPU), filled(1.0)
    copies.begin(tmp_path, 0, state, {})
    copies.complete(wait=True)
    state["exp_avg"][0].view.view(-1)[1] = value
    copies.begin(tmp_path, 0, state, {})
    with pytest.raises(SaveFailed, match="'exp_avg' of 'embed' has NaN or infinite values, so nothing is saved"):
        copies.complete(wait=True)
    assert [each.name for each in tmp_path.iterdir()] == ["rank-00000.safetensors"]
    copies.begin(tmp_path, 0, filled(3.0), {})
    copies.close()
    assert CheckpointSource(tmp_path, "exp_avg").read("norm", (0,), (2,)).tolist() == [3.0, 3.0]


def test_a_full_memory_is_found_before_a_page_is_written_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that finds no room when it is written to would end the process."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    copies = StateCopies(CPU)
    with pytest.raises(SaveFailed, match=r"cannot make .*rank-00000.safetensors: .*No space left .* GiB are needed"):
        copies.begin(tmp_path, 0, filled(1.0), {})
    assert list(tmp_path.iterdir()) == []
    copies.close()


def test_a_gpu_without_room_for_what_is_cast_fails_the_copy_once_what_is_queued_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, device: object) -> None:
            pass

        def synchronize(self) -> None:
            log.append("waited")

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        log.append("copied" if len(log) < 2 else "refused")
        if log[-1] == "refused":
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    copies = StateCopies(CPU, copying=CopyingFromGpu(CPU))
    with pytest.raises(SaveFailed, match="^cannot copy to memory: .*CUDA out of memory"):
        copies.begin(tmp_path, 0, filled(1.0), {})
    assert log == ["copied", "copied", "refused", "waited"]
    copies.close()


def test_state_that_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    copies = StateCopies(CPU)
    with pytest.raises(SaveFailed, match=r"'extra/0' is of torch.complex64, which cannot be saved"):
        copies.begin(tmp_path, 0, {}, {"phase": torch.zeros(1, dtype=torch.complex64)})
    copies.close()


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 8192)
    (tmp_path / "rank-00000.safetensors").symlink_to(tmp_path / "other")
    copies = StateCopies(CPU)
    with pytest.raises(SaveFailed, match="cannot make .*rank-00000.safetensors"):
        copies.begin(tmp_path, 0, {}, {})
    assert (tmp_path / "other").read_bytes() == b"x" * 8192
    copies.close()


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(4))
def test_processes_that_are_killed_at_any_moment_leave_the_newest_complete_copy(tmp_path: Path, seed: int) -> None:
    def later() -> bool:
        time.sleep(0.013 * seed)
        return True

    def writes_over() -> bool:
        """The files are given up, and no rank is done."""
        actor = "checkpoints/step-*.partial/actor"
        return bool(list(tmp_path.glob(f"{actor}/rank-00000.safetensors"))) and not list(
            tmp_path.glob(f"{actor}/*.json")
        )

    # From the third one on, files are written over.
    require_newest_of_killed(tmp_path, "copy", made=3, moment=later if seed else writes_over)
