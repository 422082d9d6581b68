"""Two sides that resolved the same names can tell whether they found the same code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import asdict

import corerl
from corerl.errors import PluginIncompatible
from corerl.plugin.origins import Origin, origins_of, plugins_here, require_met, unmet
from corerl.plugin.registry import Kind, Loaded, load

Install = Callable[..., Path]
CORE = Origin(what="corerl", distribution="corerl", version=corerl.__version__)


@pytest.fixture
def plugins(install: Install, backend_spec: str, extension_spec: str) -> list[tuple[Kind, Loaded]]:
    install("corerl-mine", {"backends": {"mine": "mine_fp:SPEC"}}, version="0.2", mine_fp=backend_spec)
    install("corerl-wrap", {"extensions": {"wrap": "wrap_fp:SPEC"}}, version="0.5", wrap_fp=extension_spec)
    return [(kind, load(kind, name)) for kind, name in ((Kind.BACKENDS, "mine"), (Kind.EXTENSIONS, "wrap"))]


MINE = Origin(what="backend 'mine'", distribution="corerl-mine", version="0.2", value="mine_fp:SPEC")
WRAP = Origin(what="extension 'wrap'", distribution="corerl-wrap", version="0.5", value="wrap_fp:SPEC")


def test_the_origins_of_a_process_are_plain_data(plugins: list[tuple[Kind, Loaded]]) -> None:
    own = origins_of(*plugins)
    assert own == (CORE, MINE, WRAP)
    assert pickle.loads(pickle.dumps(own)) == own
    assert plugins_here([("backends", "mine")]) == [asdict(CORE), asdict(MINE)]


def test_a_plugin_that_is_not_there_is_listed_with_why() -> None:
    core, missing = (Origin(**each) for each in plugins_here([("backends", "nowhere")]))
    assert core == CORE and (missing.what, missing.distribution) == ("backend 'nowhere'", "")
    assert MINE.against(missing) == missing.problem
    assert missing.problem.startswith("unknown backend 'nowhere'; installed: ")


# ---- requirements, with pip's own answers as the reference -----------------------------------------------------------


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


def test_unmet_requirements_are_one_line(wants: Wants) -> None:
    wants("ancient>=2.1,<3", "modern<1", "absent-lib", "fine>=1", ancient="1.6.0", modern="1.0", fine="1")
    with pytest.raises(PluginIncompatible) as caught:
        require_met(["corerl-mine"])
    assert caught.value.message == (
        "corerl-mine 0.2 requires ancient<3,>=2.1, but ancient 1.6.0 is installed; "
        "corerl-mine 0.2 requires modern<1, but modern 1.0 is installed; "
        "corerl-mine 0.2 requires absent-lib, but no absent-lib is installed; "
        "python -m pip install 'ancient<3,>=2.1' 'modern<1' 'absent-lib'"
    )
    assert caught.value.exit_status == 2


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
