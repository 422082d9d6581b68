"""Checkpoints on disk: published whole, listed, replaced, expired, deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corerl_tinker import checkpoints
from corerl_tinker.checkpoints import Checkpoints
from corerl_tinker.requests import ModelMade, Refused, Saved

CONFIG = "seed = 0\n"
MADE = ModelMade(base_model="tiny", tokenizer="tiny", rank=4)
PATH = "tinker://a:train:0/weights/step-1"


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    found = Checkpoints(tmp_path / "checkpoints", CONFIG)
    found.begin("a:train:0", MADE, {"renderer": "role_colon"})
    return found


def save(kept: Checkpoints, path: str = PATH, *, text: str = "weights", ttl: int | None = None) -> Saved:
    def write(directory: Path) -> int:
        directory.mkdir()
        return (directory / "rank-00000.json").write_text(text)

    return kept.save(path, write, ttl=ttl, overwrite=True, user_metadata={"step": text})


def text_at(kept: Checkpoints, path: str = PATH) -> str:
    return (kept.state_of(path) / "rank-00000.json").read_text()


def test_another_server_finds_what_was_saved(kept: Checkpoints, tmp_path: Path) -> None:
    first = save(kept)
    second = save(kept, "tinker://a:train:0/sampler_weights/step-1", text="others")
    kept.begin("b:train:0", MADE, {})
    later = Checkpoints(tmp_path / "checkpoints", CONFIG)
    run, empty = later.runs()
    assert (run.id, run.made, run.user_metadata) == ("a:train:0", MADE, {"renderer": "role_colon"})
    assert run.checkpoints == (first, second) and (first.kind, second.kind) == ("training", "sampler")
    assert (empty.id, empty.checkpoints) == ("b:train:0", ())
    assert later.find(PATH) == (run, first)
    assert (text_at(later), text_at(later, second.path)) == ("weights", "others")
    assert first.bytes == len("weights") and first.user_metadata == {"step": "weights"}


def test_a_save_that_fails_leaves_what_was_there(kept: Checkpoints) -> None:
    save(kept)

    def fails(directory: Path) -> int:
        directory.mkdir()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        kept.save(PATH, fails, ttl=None, overwrite=True, user_metadata={})
    assert text_at(kept) == "weights" and len(kept.runs()[0].checkpoints) == 1
    save(kept, text="again")
    assert text_at(kept) == "again" and len(kept.runs()[0].checkpoints) == 1


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
    assert save(kept, ttl=60).expires == 1060
    now = 1059.0
    kept.expire(PATH, ttl=10)
    assert kept.find(PATH)[1].expires == 1069.0
    state = kept.state_of(PATH)
    now = 1069.0
    assert kept.runs()[0].checkpoints == () and not state.exists()
    save(kept, ttl=5)
    kept.expire(PATH, ttl=None)
    now = 1e9
    assert text_at(kept) == "weights"


def test_what_is_deleted_is_gone(kept: Checkpoints) -> None:
    save(kept)
    state = kept.state_of(PATH)
    kept.delete(PATH)
    assert not state.exists() and kept.runs()[0].checkpoints == ()
    for call in (kept.find, kept.state_of, kept.delete):
        with pytest.raises(Refused, match="was deleted") as refused:
            call(PATH)
        assert refused.value.status == 404


@pytest.mark.parametrize(
    "path",
    [
        "tinker://a:train:0/weights/../../run.json",
        "tinker://../weights/x",
        "tinker://a/weights/.hidden",
        "tinker://a/other/x",
        "a/weights/x",
        "tinker://a/weights/x\n",
    ],
)
def test_paths_lead_nowhere_else(path: str, kept: Checkpoints) -> None:
    with pytest.raises(Refused, match="the path of a checkpoint is"):
        kept.find(path)


def test_what_others_have_put_there_is_not_listed(kept: Checkpoints, tmp_path: Path) -> None:
    save(kept)
    (tmp_path / "checkpoints" / "notes").mkdir()
    (tmp_path / "checkpoints" / "a:train:0" / "weights" / "with a space").mkdir()
    save(kept, "tinker://a:train:0/weights/cut")
    (tmp_path / "checkpoints" / "a:train:0" / "weights" / "cut" / "checkpoint.json").write_text("")
    kept.begin("c:train:0", MADE, {})
    (tmp_path / "checkpoints" / "c:train:0" / "run.json").write_text("{}")
    (run,) = kept.runs()
    assert [saved.path for saved in run.checkpoints] == [PATH]


def test_runs_are_in_the_order_of_their_use(kept: Checkpoints, tmp_path: Path) -> None:
    kept.begin("b:train:0", MADE, {})
    for run, seconds in (("a:train:0", 100.0), ("b:train:0", 50.0)):
        os.utime(tmp_path / "checkpoints" / run / "run.json", (seconds, seconds))
    assert [(run.id, run.used) for run in kept.runs()] == [("b:train:0", 50.0), ("a:train:0", 100.0)]
    save(kept, "tinker://b:train:0/weights/x")
    assert kept.runs()[-1].id == "b:train:0"
