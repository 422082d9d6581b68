"""Fixtures of the checks: a backend on its ranks, models, and runs that several checks share. A part of `plugin`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from corerl.config import ClusterInfo, config_of, structure
from corerl.plugin import Capability, Kind, Variant, load
from corerl.plugin.registry import Loaded
from corerl_testing.outcomes import SELECTED, gpus
from corerl_testing.pool import OneRank, RankPool, Ranks

if TYPE_CHECKING:
    from corerl_testing.subject import Runs, Subject
    from corerl_testing.trial import Trial


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """The backend to check: override this in the file that imports the suite, or pass --corerl-backend."""
    name: str = request.config.getoption("--corerl-backend")
    if not name:
        raise pytest.UsageError("no backend to check; override the fixture backend_name, or pass --corerl-backend NAME")
    return name


@pytest.fixture(scope="session")
def backend_options(request: pytest.FixtureRequest, backend_name: str) -> Callable[[int], Mapping[str, Any]]:
    """The options that the backend is checked with, by level; override this if the defaults do not fit."""
    overrides: Sequence[str] = request.config.getoption("--corerl-override")
    tables = config_of({"backend": {"name": backend_name}}, overrides).backends
    own = tables.get(load(Kind.BACKENDS, backend_name).name, {})
    return lambda level: own


@pytest.fixture(scope="session")
def backend_variant() -> Variant | None:
    """The spec's variant to check; None for none. Override this with params=with_variants(NAME) for all of them."""
    return None


@pytest.fixture
def options(
    request: pytest.FixtureRequest,
    backend_options: Callable[[int], Mapping[str, Any]],
    backend_variant: Variant | None,
) -> Mapping[str, Any]:
    own = backend_options(request.node.stash[SELECTED].level)
    return own if backend_variant is None else {**own, **backend_variant.options}


@pytest.fixture
def loaded(backend_name: str) -> Loaded:
    """The backend's spec, and its entry point."""
    return load(Kind.BACKENDS, backend_name)


@pytest.fixture(scope="session")
def algorithm_name(request: pytest.FixtureRequest) -> str:
    """The algorithm to check: override this in the file that imports its suite, or pass --corerl-algorithm."""
    name: str = request.config.getoption("--corerl-algorithm")
    if not name:
        raise pytest.UsageError(
            "no algorithm to check; override the fixture algorithm_name, or pass --corerl-algorithm NAME"
        )
    return name


@pytest.fixture(scope="session")
def algorithm_overrides(request: pytest.FixtureRequest) -> Sequence[str]:
    """Settings that the algorithm is checked with, as `corerl train` takes them; override this to check others than the
    defaults."""
    overrides: Sequence[str] = request.config.getoption("--corerl-override")
    return overrides


@pytest.fixture(scope="module")
def trial(algorithm_name: str, algorithm_overrides: Sequence[str]) -> Trial:
    """The algorithm, on made-up samples."""
    from corerl_testing.trial import Trial

    return Trial(algorithm_name, algorithm_overrides)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Two rank processes, for the whole test run."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """Four rank processes, for one file: they take memory."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def rank_sets(rank_pool: RankPool) -> Mapping[int, Ranks]:
    """World size -> the processes that run its ranks."""
    return {1: OneRank(), rank_pool.world_size: rank_pool}


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of model -> a directory written by transformers."""
    from corerl_testing.models import MODELS, write_tiny_model

    return {kind: write_tiny_model(kind, tmp_path_factory.mktemp("models") / kind) for kind in MODELS}


@pytest.fixture(scope="session")
def runs(rank_sets: Mapping[int, Ranks], model_directories: Mapping[str, Path]) -> Runs:
    """Trajectories that several checks share, each trained once."""
    from corerl_testing.subject import Runs

    return Runs(rank_sets, model_directories)


@pytest.fixture(scope="session")
def gpu_runs(
    backend_name: str,
    backend_options: Callable[[int], Mapping[str, Any]],
    model_directories: Mapping[str, Path],
) -> Iterator[Runs]:
    """Runs on one GPU, and on two if there are two, in the environment that the backend asks for."""
    from corerl_testing.subject import Runs

    spec = load(Kind.BACKENDS, backend_name).spec
    options = structure(backend_options(3), spec.config, path="")
    pools = {
        size: RankPool(size, "cuda", spec.environment(options, ClusterInfo(device="cuda", ranks=size)))
        for size in (1, 2)
        if size <= gpus()
    }
    yield Runs(pools, model_directories)
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def _refusals() -> dict[str, str]:
    """Backend -> its refusal of several ranks, kept so that it is asked once."""
    return {}


@pytest.fixture
def subject(
    request: pytest.FixtureRequest,
    backend_name: str,
    options: Mapping[str, Any],
    backend_variant: Variant | None,
    world_size: int,
    runs: Runs,
    tmp_path: Path,
    _refusals: dict[str, str],
) -> Subject:
    """The backend on `world_size` ranks, allowed to try what it declares that it lacks.

    Several ranks are the exception: a backend that declares itself one process is asked once to start on two, and each
    check on two ranks then ends with its refusal.
    """
    from corerl_testing.subject import Subject

    found = request.node.stash[SELECTED]
    if found.level == 3:
        if world_size > gpus():
            pytest.skip(f"needs {world_size} GPUs, but there are {gpus()}")
        runs = request.getfixturevalue("gpu_runs")
    elif world_size == 4:
        runs = runs.beside({4: request.getfixturevalue("four_ranks")})
    subject = Subject(
        backend=backend_name,
        world_size=world_size,
        device="cuda" if found.level == 3 else "cpu",
        runs=runs,
        directory=tmp_path,
        options=options,
        varied=backend_variant is not None,
        lifted=bool(found.unsupported),
    )
    subject.require_ranks(world_size)
    if str(Capability.MULTI_RANK) in found.unsupported:
        if backend_name not in _refusals:
            _refusals[backend_name] = subject.refusal_of_two_ranks()
        if _refusals[backend_name]:
            pytest.fail(_refusals[backend_name], pytrace=False)
    return subject


@pytest.fixture(scope="module")
def slots() -> Iterator[Mapping[str, Any]]:
    """Ray, started by the first check that needs it; these checks come last, so that no other finds it running."""
    from corerl_testing import groups

    with groups.slots() as slots:
        yield slots


@pytest.fixture(scope="module")
def _wrapped() -> dict[str, Any]:
    return {}


@pytest.fixture
def wrapped(subject: Subject, slots: Mapping[str, Any], _wrapped: dict[str, Any]) -> Any:
    """A group with three wrappers around its backend, after it has run and lost a rank; shared by several checks."""
    from corerl_testing import groups

    setup = subject.setup("qwen3")
    key = repr((setup, subject.world_size))
    if key not in _wrapped:
        _wrapped[key] = groups.wrapped(setup, subject.world_size, slots["actor"], subject.directory / "wrapped")
    return _wrapped[key]
