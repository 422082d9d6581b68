"""Fixtures for tests of backends, in core and in plugins: `pytest_plugins = ["corerl.testing.fixtures"]`.

What is heavy is imported by the first test that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.register_assert_rewrite("corerl.testing.checks", "corerl.testing.critic_checks")

from corerl.testing.pool import OneRank, RankPool, Ranks  # noqa: E402

if TYPE_CHECKING:
    from corerl.testing.checks import Runs


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Two processes, for the whole test run."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def rank_sets(rank_pool: RankPool) -> Mapping[int, Ranks]:
    """World size -> where its ranks run."""
    return {1: OneRank(), rank_pool.world_size: rank_pool}


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> a directory that transformers wrote."""
    from corerl.testing.models import KINDS, write_tiny_model

    return {kind: write_tiny_model(kind, tmp_path_factory.mktemp("models") / kind) for kind in KINDS}


@pytest.fixture(scope="session")
def runs(rank_sets: Mapping[int, Ranks], model_directories: Mapping[str, Path]) -> Runs:
    """Trajectories that several checks look at, each trained once."""
    from corerl.testing.checks import Runs

    return Runs(rank_sets, model_directories)


@pytest.fixture
def subject(request: pytest.FixtureRequest, world_size: int, runs: Runs, tmp_path: Path) -> Any:
    """The backend of the class that asks, on `world_size` ranks."""
    from corerl.testing.checks import Subject

    return Subject(backend=request.cls.backend_name, world_size=world_size, runs=runs, directory=tmp_path)
