from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corerl_testing.harness import Setup
from corerl_testing.subject import Runs, Subject


class Told:
    """Stands for one rank: tells what it is asked to run, and runs it."""

    world_size = 1

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.ran.append(args[1:])
        return [function(*args)]


def named(setup: Setup, number: int) -> tuple[str, str, int]:
    return setup.backend, setup.model, number


def test_losses_are_those_of_any_run_that_is_as_long() -> None:
    runs, trained = Runs({1: Told()}, {"qwen3": Path("there")}), []

    def train(world_size: int, setup: Setup, numbers: Sequence[int], **saving: Any) -> Any:
        trained.append((world_size, list(numbers)))
        return SimpleNamespace(losses=[number / 4 for number in numbers])

    runs.train = train  # type: ignore[method-assign]
    setup = runs.setup("plain", "qwen3")
    assert runs.losses(1, setup, 2) == [0.0, 0.25]
    runs.trained_as(1, setup, 4)
    assert runs.losses(1, setup, 3) == [0.0, 0.25, 0.5]
    assert runs.losses(1, runs.setup("plain", "qwen3", (1, 1)), 1) == runs.losses(2, setup, 1) == [0.0]
    assert trained == [(1, [0, 1]), (1, [0, 1, 2, 3]), (1, [0]), (2, [0])]


def test_the_plain_backends_side_is_run_once() -> None:
    rank = Told()
    runs = Runs({1: rank}, {"qwen3": Path("there"), "llama": Path("elsewhere")})
    beside = runs.beside({4: Told()}, {"own": Path("own")})
    for each in (runs, beside):
        assert each.of_plain(named, "qwen3", 1) == [("plain", "there", 1)]
        assert each.of_plain(named, "llama", 1) == [("plain", "elsewhere", 1)]
        assert each.of_plain(named, "qwen3", 2) == [("plain", "there", 2)]
    assert rank.ran == [(1,), (1,), (2,)]
    assert beside.of_plain(named, "own", 1) == [("plain", "own", 1)]
    assert sorted(beside.rank_sets) == [1, 4] and sorted(runs.models) == ["llama", "qwen3"]


def test_a_check_skips_ranks_that_the_spec_refuses(tmp_path: Path) -> None:
    def subject(**options: Any) -> Subject:
        runs = Runs({}, {})
        return Subject(
            backend="plugins.testing.tests.faults:SPLIT", world_size=2, runs=runs, directory=tmp_path, options=options
        )

    subject(parts=2).require_ranks(2)
    subject().require_ranks(1)
    with pytest.raises(
        pytest.skip.Exception, match=r"^the spec refuses these options on 1 rank\(s\): parts = 2 does not"
    ):
        subject(parts=2).require_ranks(1)
