"""A server whose engines hold several versions of the adapters, each of which is sampled from by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from plugins.tinker.tests.served import (
    LORA,
    MODEL,
    PROMPT,
    Served,
    in_flight,
    publish,
    same,
    serving,
    train,
)
from tests.driver.fakes import colocated


@pytest.fixture(scope="module")
def serving_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    weights = {"transport": "disk", "lora": "adapter", "versions": 2}
    with serving(tmp_path_factory.mktemp("versions"), {**LORA, "weights": weights}, snapshots=4) as found:
        yield found


@pytest.fixture
def served(serving_one: Served) -> Served:
    serving_one.new_model("b:train:0", rank=4)
    return serving_one


def test_earlier_weights_answer_alike_while_others_are_published(served: Served, pushed: list[str]) -> None:
    base = served.policy.sampler(None, MODEL)
    alone, scored = served.draw(base, seed=3), served.logprobs(base, PROMPT)
    found = []
    for number in range(3):
        train(served.policy, 1)
        player = publish(served)
        for turn in range(3):
            drawn = served.draw(player, seed=turn)
            own = served.logprobs(player, [*PROMPT, *drawn.sequences[0].tokens])[len(PROMPT) :]
            np.testing.assert_allclose(drawn.sequences[0].logprobs, own, atol=1e-5)
            assert same(served.draw(base, seed=3), alone)
        found.append(tuple(drawn.sequences[0].logprobs or ()))
        assert pushed == [""] * (number + 2)  # engines hold both, and forget the player of the step before
    assert len(set(found)) == 3 and served.logprobs(base, PROMPT).tobytes() == scored.tobytes()


def test_what_engines_hold_no_more_is_sent_again(served: Served, pushed: list[str]) -> None:
    samplers, expected = [], []
    for _ in range(3):
        train(served.policy, 1)
        samplers.append(publish(served))
        expected.append(served.draw(samplers[-1], seed=3))
    assert pushed == ["", "", ""]
    assert same(served.draw(samplers[1], seed=3), expected[1]) and len(pushed) == 3
    assert same(served.draw(samplers[0], seed=3), expected[0]) and len(pushed) == 4  # in the place of the third
    assert same(served.draw(samplers[1], seed=3), expected[1]) and len(pushed) == 4
    assert same(served.draw(samplers[2], seed=3), expected[2]) and len(pushed) == 5
    assert not any(same(expected[0], each) for each in expected[1:])


def test_a_push_waits_not_for_versions_that_stay(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    old = publish(served)
    train(served.policy, 1)

    async def sampling() -> None:
        async with in_flight(served, old, monkeypatch) as first:
            for _ in range(2):  # the second one goes in place of the first, which nobody samples from
                new = await asyncio.wait_for(asyncio.to_thread(publish, served), 30.0)
                await asyncio.to_thread(train, served.policy, 1)
        assert not same(await served.drawing(new, seed=5), first.result())

    asyncio.run(sampling())


def test_a_push_on_shared_devices_waits_for_all_samples(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """There engines sleep before weights arrive, and lose the earlier ones."""
    engines = served.engines
    shared: Any = {"actor": engines.group}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "residency", colocated(shared, passed=["actor"], fleet=engines.fleet))  # type: ignore[arg-type]
        engines.fleet.sleep()
        old = publish(served)
        expected = served.draw(old, seed=5)
        train(served.policy, 1)
        assert same(served.draw(old, seed=5), expected)

        async def sampling() -> None:
            async with in_flight(served, old, monkeypatch):
                pushing = asyncio.create_task(asyncio.to_thread(served.policy._samplers.push))
                await asyncio.wait([pushing], timeout=0.3)
                assert not pushing.done()
            await pushing

        asyncio.run(sampling())
        assert len(engines.held) == 1
        engines.turn("train")  # ranks are awake for the other tests, and engines too
        engines.fleet.wake_up()


def test_samples_whose_version_goes_meanwhile_are_sampled_again(
    served: Served, pushed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = publish(served)
    expected = served.draw(sampler, seed=5)
    begin, begun = served.engines.begin, list[int]()

    def of_an_earlier_version(self: Any, request: Any) -> Any:
        begun.append(request.version)
        if len(begun) == 1:  # as if engines had been replaced since
            served.engines.fleet.forget(request.version)
        return begin(request)

    monkeypatch.setattr(type(served.engines), "begin", of_an_earlier_version)
    assert same(served.draw(sampler, seed=5), expected)
    assert len(begun) == 2 and begun[0] < begun[1] and pushed[-1:] == [""]
