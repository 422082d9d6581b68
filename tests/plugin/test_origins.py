"""Two sides that resolved the same names can tell whether they found the same code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import asdict

import corerl
from corerl.plugin.origins import Origin, origins_of, plugins_here
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
