"""Which requests of episodes are sent together: by the number of episodes that may ask, or by a clock of the test's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl.errors import EngineFailed
from corerl_agents import gathering
from corerl_agents.gathering import Gathering

LONG = 3600.0  # seconds


class Engine:
    """Says a row's noise key."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.failure: Exception | None = None

    async def __call__(self, request: GenerateRequest) -> Generation:
        self.calls.append(request.noise_keys.tolist())
        if self.failure is not None:
            raise self.failure
        return Generation(
            tokens=request.noise_keys,
            offsets=np.arange(len(request) + 1),
            logprobs=np.zeros(len(request), np.float32),
            versions=np.zeros(len(request), np.int64),
            truncated=np.zeros(len(request), np.bool_),
        )


def row(key: int, token: int = 5, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        tokens=np.array([token]), offsets=np.array([0, 1]), noise_keys=np.array([key]), params=SamplingParams(**params)
    )


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def playing(engine: Engine, episodes: int) -> Gathering:
    made = Gathering(engine)
    for _ in range(episodes):
        made.joins()
    return made


def test_rows_of_one_episode_are_ordered_by_content() -> None:
    async def order(tokens: list[int]) -> list[list[int]]:
        sent: list[list[int]] = []

        async def engine(request: GenerateRequest) -> Generation:
            sent.append(request.tokens.tolist())
            return await Engine()(request)

        gathering = playing(engine, 2)  # type: ignore[arg-type]
        asked = [asyncio.create_task(gathering.generate(row(7, token), 0)) for token in tokens]
        await settled()
        await asyncio.gather(gathering.generate(row(3), 1), *asked)
        return sent

    assert asyncio.run(order([9, 6, 8])) == asyncio.run(order([6, 8, 9])) == [[6, 8, 9, 5]]


def test_requests_are_sent_once_all_episodes_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "QUIET", LONG)
    monkeypatch.setattr(gathering, "GATHER", LONG)

    async def run() -> None:
        engine = Engine()
        gathered = playing(engine, 3)
        tasks = [asyncio.ensure_future(gathered.generate(row(key), key)) for key in (2, 1)]
        await settled()
        assert engine.calls == []
        gathered.joins()
        third = asyncio.ensure_future(gathered.generate(row(0), 0))
        await settled()
        assert engine.calls == []  # one of four has not asked
        gathered.leaves()
        await settled()
        assert engine.calls == [[0, 1, 2]]
        assert [int(task.result().tokens[0]) for task in [*tasks, third]] == [2, 1, 0]

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["QUIET", "GATHER"])
def test_requests_are_sent_after_a_quiet_while(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "QUIET", LONG)
    monkeypatch.setattr(gathering, "GATHER", LONG)
    monkeypatch.setattr(gathering, limit, 0.0)

    async def run() -> None:
        engine = Engine()
        gathered = playing(engine, 3)
        assert (await gathered.generate(row(7), 0)).tokens.tolist() == [7]
        assert engine.calls == [[7]]

    asyncio.run(run())


def test_other_parameters_cancelled_requests_and_failures_are_told_apart() -> None:
    async def run() -> None:
        engine = Engine()
        gathered = playing(engine, 4)
        tasks = [asyncio.ensure_future(gathered.generate(row(key, temperature=1.0 + key % 2), key)) for key in range(3)]
        await settled()
        tasks[0].cancel()
        gathered.leaves()  # whoever played the episode
        await settled()
        assert engine.calls == [] and tasks[0].cancelled()
        tasks.append(asyncio.ensure_future(gathered.generate(row(3, temperature=2.0), 3)))
        await settled()
        assert engine.calls == [[1, 3], [2]]

        engine.failure = EngineFailed("no memory")
        failing = [asyncio.ensure_future(gathered.generate(row(key), key)) for key in range(3)]
        await settled()
        for task in failing:
            with pytest.raises(EngineFailed, match="^no memory$"):
                task.result()

    asyncio.run(run())
