"""What probes say of libraries that they find, and do not find."""

from __future__ import annotations

from importlib import metadata

import pytest

from corerl.plugin.probing import check_library, version_numbers
from corerl.plugin.spec import Finding, Level


def found(distribution: str = "numpy") -> Finding:
    return check_library("Wood", distribution, oldest=(0, 19, 8), end=(0, 20), why="it splinters", fix="plant a tree")


def test_a_library_that_is_not_installed_is_an_error() -> None:
    assert found("corerl-is-not-made-of-this") == Finding(
        level=Level.ERROR, what="Wood is not installed", why="this backend is built on it", fix="plant a tree"
    )


@pytest.mark.parametrize("installed", ["0.19.8", "0.19.8+cu130", "0.19.12", "0.19.9.post1"])
def test_a_version_in_between_is_one_to_run_with(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    assert found() == Finding(level=Level.OK, what=f"Wood {installed} is supported by this backend")


@pytest.mark.parametrize("installed", ["0.19.7", "0.19", "0.20", "0.20.0rc1", "1.0"])
def test_an_older_or_later_version_is_an_error_that_says_why(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    assert found() == Finding(
        level=Level.ERROR,
        what=f"Wood {installed} is not supported by this backend",
        why="it splinters",
        fix="plant a tree",
    )


def test_a_versions_numbers_end_where_letters_begin() -> None:
    assert [version_numbers(text) for text in ("2.13.0+cpu", "0.17.0rc1", "3", "2.11.0a0+git1234")] == [
        (2, 13, 0),
        (0, 17),
        (3,),
        (2, 11),
    ]
