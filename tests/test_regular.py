from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from corerl.regular import require_all_regular, require_regular


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_files_and_directories_and_links_to_them_are_let_through(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("loop")
    (tmp_path / "loop").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "file", tmp_path / "link"):
        require_regular(path)
    require_all_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        require_regular(tmp_path / "absent")


def test_what_may_never_end_is_named(pipe: Path) -> None:
    (pipe.parent / "zero").symlink_to("/dev/zero")
    for path in (pipe, pipe.parent / "zero"):
        with pytest.raises(OSError, match="is a pipe or a device, not a regular file") as caught:
            require_regular(path)
        assert caught.value.filename == str(path)
    with pytest.raises(OSError, match="is a pipe or a device") as caught:
        require_all_regular(pipe.parent)
    assert caught.value.filename == str(pipe)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_no_path_can_be_is_an_os_error(name: str) -> None:
    with pytest.raises(OSError, match="is no path"):
        require_regular(name)


def test_what_may_not_be_read_is_told_as_such_but_does_not_keep_a_library_from_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    def refuses(path: Path, flags: int) -> int:  # root may read all
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(PermissionError):
        require_regular(tmp_path / "file")
    require_all_regular(tmp_path)
