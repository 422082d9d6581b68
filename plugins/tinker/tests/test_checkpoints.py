"""Checkpoints on disk: published whole, listed, replaced, expired, deleted."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from tinker.types import Checkpoint, TrainingRun

from corerl_tinker import checkpoints
from corerl_tinker.checkpoints import Checkpoints
from corerl_tinker.requests import Refused

CONFIG = "seed = 0\n"
PATH = "tinker://a:train:0/weights/step-1"


def run(name: str, metadata: dict[str, str]) -> TrainingRun:
    return TrainingRun(
        training_run_id=name,
        base_model="tiny",
        model_owner="local",
        is_lora=True,
        lora_rank=4,
        last_request_time=datetime.now(UTC),
        user_metadata=metadata,
    )


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    found = Checkpoints(tmp_path / "checkpoints", CONFIG)
    found.begin(run("a:train:0", {"renderer": "role_colon"}))
    return found


def save(kept: Checkpoints, path: str = PATH, *, text: str = "weights", ttl: int | None = None) -> Checkpoint:
    def write(directory: Path) -> int:
        directory.mkdir()
        return (directory / "rank-00000.json").write_text(text)

    return kept.save(path, write, ttl=ttl, overwrite=True, user_metadata={"step": text})


def text_at(kept: Checkpoints, path: str = PATH) -> str:
    return (kept.state_of(path) / "rank-00000.json").read_text()


def test_another_server_finds_what_was_saved(kept: Checkpoints, tmp_path: Path) -> None:
    first = save(kept)
    second = save(kept, "tinker://a:train:0/sampler_weights/step-1", text="others")
    kept.begin(run("b:train:0", {}))
    later = Checkpoints(tmp_path / "checkpoints", CONFIG)
    found, empty = later.run("a:train:0"), later.run("b:train:0")
    assert (found.training_run_id, found.base_model, found.lora_rank) == ("a:train:0", "tiny", 4)
    assert found.user_metadata == {"renderer": "role_colon"}
    assert later.of("a:train:0") == [first, second]
    assert (found.last_checkpoint, found.last_sampler_checkpoint) == (first, second)
    assert (first.checkpoint_type, second.checkpoint_type) == ("training", "sampler")
    assert empty.training_run_id == "b:train:0" and later.of("b:train:0") == []
    assert later.find(PATH) == (found, first)
    assert (text_at(later), text_at(later, second.tinker_path)) == ("weights", "others")
    assert first.size_bytes == len("weights") and first.user_metadata == {"step": "weights"}


def test_a_save_that_fails_leaves_what_was_there(kept: Checkpoints) -> None:
    save(kept)

    def fails(directory: Path) -> int:
        directory.mkdir()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        kept.save(PATH, fails, ttl=None, overwrite=True, user_metadata={})
    assert text_at(kept) == "weights" and len(kept.of("a:train:0")) == 1
    assert [each.name for each in kept.state_of(PATH).parents[1].iterdir()] == ["step-1"]  # or the disk stays full
    save(kept, text="again")
    assert text_at(kept) == "again" and len(kept.of("a:train:0")) == 1


def test_a_server_that_ends_as_it_replaces_leaves_the_new(kept: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(kept)
    removed = []

    def killed(path: Path, **_: bool) -> None:
        removed.append(path.exists())
        if removed[-1] and (path / "state").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(kept, text="new")
    assert text_at(kept) == "new"


def test_what_has_expired_is_gone(kept: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(checkpoints.time, "time", lambda: now)
    assert save(kept, ttl=60).expires_at == at(1060)
    now = 1059.0
    kept.expire(PATH, ttl=10)
    assert kept.find(PATH)[1].expires_at == at(1069)
    state = kept.state_of(PATH)
    now = 1069.0
    assert kept.of("a:train:0") == [] and not state.exists()
    save(kept, ttl=5)
    kept.expire(PATH, ttl=None)
    now = 1e9
    assert text_at(kept) == "weights"
    expired = save(kept, "tinker://a:train:0/weights/nobody-asks-for", ttl=5).tinker_path
    state = kept.state_of(expired)
    now += 5
    kept.begin(run("b:train:0", {}))
    save(kept, "tinker://b:train:0/weights/step-1")
    assert not state.exists() and text_at(kept) == "weights"


def test_what_is_deleted_is_gone(kept: Checkpoints) -> None:
    save(kept)
    state = kept.state_of(PATH)
    kept.delete(PATH)
    assert not state.exists() and kept.of("a:train:0") == []
    for call in (kept.find, kept.state_of, kept.delete):
        with pytest.raises(Refused, match="was deleted") as refused:
            call(PATH)
        assert refused.value.status == 404


def test_paths_lead_nowhere_else(kept: Checkpoints) -> None:
    wrong = ["a:train:0/weights/../../run.json", "../weights/x", "a/weights/.hidden", "a/other/x", "a/weights/x\n"]
    for path in ("a/weights/x", *(f"tinker://{each}" for each in wrong)):
        with pytest.raises(Refused, match="the path of a checkpoint is"):
            kept.find(path)


def test_what_others_have_put_there_is_not_listed(kept: Checkpoints, tmp_path: Path) -> None:
    save(kept)
    (tmp_path / "checkpoints" / "notes").mkdir()
    (tmp_path / "checkpoints" / "a:train:0" / "weights" / "with a space").mkdir()
    save(kept, "tinker://a:train:0/weights/cut")
    (tmp_path / "checkpoints" / "a:train:0" / "weights" / "cut" / "checkpoint.json").write_text("")
    kept.begin(run("c:train:0", {}))
    (tmp_path / "checkpoints" / "c:train:0" / "run.json").write_text("{}")
    for name in ("notes", "c:train:0"):
        with pytest.raises(Refused, match="has no checkpoint here"):
            kept.run(name)
    assert [saved.tinker_path for saved in kept.of("a:train:0")] == [PATH]
