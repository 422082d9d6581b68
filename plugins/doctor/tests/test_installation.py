"""Requirements that the environment does not meet, with pip's own answers as the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from corerl.plugin import unmet

Install = Callable[..., Path]


@pytest.fixture
def wants(install: Install) -> Callable[..., list[str]]:
    """What is lacking, as (wanted, found), of a distribution with these requirements beside libraries of versions."""

    def wants(*requires: str, **installed: str) -> list[tuple[str, str]]:
        for name, version in installed.items():
            install(name, {}, version=version)
        install("corerl-mine", {}, version="0.2", requires=requires)
        return [(each.wanted, each.found) for each in unmet(["corerl-mine"])]

    return wants


Wants = Callable[..., list[tuple[str, str]]]


def test_each_unmet_requirement_is_named_with_what_is_there(install: Install) -> None:
    for name, version in {"ancient": "1.6.0", "modern": "1.0", "fine": "1"}.items():
        install(name, {}, version=version)
    requires = ("ancient>=2.1,<3", "modern<1", "absent-lib", "fine>=1")
    install("corerl-mine", {}, version="0.2", requires=requires)
    assert list(map(str, unmet(["corerl-mine"]))) == [
        "corerl-mine 0.2 requires ancient<3,>=2.1, but ancient 1.6.0 is installed",
        "corerl-mine 0.2 requires modern<1, but modern 1.0 is installed",
        "corerl-mine 0.2 requires absent-lib, but no absent-lib is installed",
    ]


@pytest.mark.parametrize(
    ("version", "admitted"),
    [
        ("2.9.0", True),
        ("2.13.0+cpu", True),
        ("2.9.0a0+50eac811a6.nv25.9", True),  # of a vendor's container
        ("2.10.0.dev20250101", True),
        ("2.8.0", False),
        ("2.8.9a1", False),
        ("3.0", False),
    ],
)
def test_local_versions_and_pre_releases_count_as_their_release(wants: Wants, version: str, admitted: bool) -> None:
    assert (wants("lib>=2.9,<3", lib=version) == []) is admitted
