"""A server whose engines hold several versions of the adapters, each of which is sampled from by name."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from corerl_tinker.options import ServeOptions
from plugins.tinker.tests.conftest import KEY, start
from plugins.tinker.tests.served import (
    LORA,
    MODEL,
    PROMPT,
    ROWS,
    VOCABULARY,
    Served,
    asked,
    at_once,
    counting_pushes,
    publish,
    same,
    serving,
    train,
)
from tests.driver.fakes import sharing


@pytest.fixture(scope="module")
def serving_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    weights = {"transport": "disk", "lora": "adapter", "versions": 2}
    with serving(tmp_path_factory.mktemp("versions"), {**LORA, "weights": weights}, snapshots=4) as found:
        yield found


@pytest.fixture
def served(serving_one: Served) -> Served:
    serving_one.new_model("b:train:0", rank=4)
    return serving_one


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies that engines are sent, "" for the weights as they are."""
    return counting_pushes(monkeypatch)


def test_earlier_weights_answer_alike_while_others_are_published(served: Served, pushed: list[str]) -> None:
    base = served.policy.sampler(None, MODEL)
    alone, scored = served.draw(asked(base, seed=3)), served.logprobs(base, PROMPT)
    found = []
    for number in range(3):
        train(served.policy, 1)
        player = publish(served)
        for turn in range(3):
            drawn = served.draw(asked(player, seed=turn))
            own = served.logprobs(player, [*PROMPT, *drawn.tokens[0]])[len(PROMPT) :]
            np.testing.assert_allclose(drawn.logprobs[0], own, atol=1e-5)
            assert same(served.draw(asked(base, seed=3)), alone)
        found.append(drawn.logprobs[0].tobytes())
        assert pushed == [""] * (number + 2)  # engines hold both, and forget the player of the step before
    assert len(set(found)) == 3 and served.logprobs(base, PROMPT).tobytes() == scored.tobytes()


def test_what_engines_hold_no_more_is_sent_again(served: Served, pushed: list[str]) -> None:
    samplers, expected = [], []
    for _ in range(3):
        train(served.policy, 1)
        samplers.append(publish(served))
        expected.append(served.draw(asked(samplers[-1], seed=3)))
    assert pushed == ["", "", ""]
    assert same(served.draw(asked(samplers[1], seed=3)), expected[1]) and len(pushed) == 3
    assert same(served.draw(asked(samplers[0], seed=3)), expected[0]) and len(pushed) == 4  # in the place of the third
    assert same(served.draw(asked(samplers[1], seed=3)), expected[1]) and len(pushed) == 4
    assert same(served.draw(asked(samplers[2], seed=3)), expected[2]) and len(pushed) == 5
    assert not any(same(expected[0], each) for each in expected[1:])


def test_a_push_does_not_wait_for_samples_of_a_version_that_stays(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = publish(served)
    expected = served.draw(asked(old, seed=5))
    train(served.policy, 1)
    held: concurrent.futures.Future[Any] = concurrent.futures.Future()
    requests: list[Any] = []
    begin = served.engines.begin
    monkeypatch.setattr(type(served.engines), "begin", lambda self, request: requests.append(request) or held)

    async def sampling() -> None:
        first = asyncio.create_task(served.policy.draw(asked(old, seed=5), at_once))
        await asyncio.sleep(0)
        new = await asyncio.wait_for(asyncio.to_thread(publish, served), 30.0)
        assert not first.done()
        monkeypatch.undo()
        held.set_result(await asyncio.wrap_future(begin(requests[0])))
        assert same(await first, expected)
        assert not same(await served.policy.draw(asked(new, seed=5), at_once), expected)

    asyncio.run(sampling())


def test_a_push_on_shared_devices_waits_for_samples_of_all_versions(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There engines sleep before weights arrive, and lose the earlier ones."""
    engines = served.engines
    shared: Any = {"actor": engines.group}
    monkeypatch.setattr(engines, "residency", sharing(shared, passed=["actor"], fleet=engines.fleet))  # type: ignore[arg-type]
    engines.fleet.sleep()
    old = publish(served)
    expected = served.draw(asked(old, seed=5))
    train(served.policy, 1)
    again = served.draw(asked(old, seed=5))
    held: concurrent.futures.Future[Any] = concurrent.futures.Future()
    requests: list[Any] = []
    begin = engines.begin
    monkeypatch.setattr(type(engines), "begin", lambda self, request: requests.append(request) or held)

    async def sampling() -> None:
        first = asyncio.create_task(served.policy.draw(asked(old, seed=5), at_once))
        await asyncio.sleep(0)
        pushing = asyncio.create_task(asyncio.to_thread(served.policy._samplers.push))
        await asyncio.wait([pushing], timeout=0.3)
        assert not pushing.done() and not first.done()
        held.set_result(await asyncio.wrap_future(begin(requests[0])))
        assert same(await first, expected) and same(again, expected)
        await pushing

    asyncio.run(sampling())
    assert len(engines.held) == 1
    engines.turn("train")  # ranks are awake for the other tests, and engines too
    engines.fleet.wake_up()


def test_samples_whose_version_goes_meanwhile_are_sampled_again(
    served: Served, pushed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = publish(served)
    expected = served.draw(asked(sampler, seed=5))
    begin, begun = served.engines.begin, list[int]()

    def of_an_earlier_version(self: Any, request: Any) -> Any:
        begun.append(request.version)
        if len(begun) == 1:  # as if engines had been replaced since
            served.engines.fleet.forget(request.version)
        return begin(request)

    monkeypatch.setattr(type(served.engines), "begin", of_an_earlier_version)
    assert same(served.draw(asked(sampler, seed=5)), expected)
    assert len(begun) == 2 and begun[0] < begun[1] and pushed[-1:] == [""]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # as the SDK leaves connections
def test_a_game_against_earlier_weights_is_played_through_the_sdk(served: Served) -> None:
    served.policy.release()
    server, thread, url = start(served.policy, ServeOptions(name=MODEL, context_length=64), [])
    try:
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        training = client.create_lora_training_client(MODEL, rank=4).result()
        opponent = training.save_weights_and_get_sampling_client().result()
        kept = opponent.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
        params = types.SamplingParams(max_tokens=2, stop=[], seed=1)
        alone = opponent.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0]
        games = []
        for _ in range(3):
            rows = [
                types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=_targets(row[1:]))
                for row in ROWS
            ]
            training.forward_backward(rows, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.02)).result()
            player = training.save_weights_and_get_sampling_client().result()
            board, moves = [1], list[tuple[Any, int, list[float]]]()
            for turn in range(6):
                mover = (player, opponent)[turn % 2]
                (move,) = mover.sample(types.ModelInput.from_ints(board), 1, params).result().sequences
                moves.append((mover, len(board), move.logprobs or []))
                board += move.tokens
            for mover, begin, logprobs in moves:
                own = mover.compute_logprobs(types.ModelInput.from_ints(board)).result()
                np.testing.assert_allclose(logprobs, own[begin : begin + 2], atol=1e-5)
            games.append([logprobs for _, _, logprobs in moves])
            again = opponent.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0]
            assert (again.tokens, again.logprobs) == (alone.tokens, alone.logprobs)  # to the last bit
            assert opponent.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result() == kept
        assert games[0] != games[1] != games[2]
        known = opponent.sample(
            types.ModelInput.from_ints(PROMPT), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=VOCABULARY
        ).result()
        of_tokens = [
            dict(place)[token] for place, token in zip(known.topk_prompt_logprobs[1:], PROMPT[1:], strict=True)
        ]
        np.testing.assert_allclose(of_tokens, kept[1:], atol=1e-5)
        np.testing.assert_allclose(known.prompt_logprobs[1:], kept[1:], atol=1e-5)
        client.close("success").result()
        del client, training, opponent, player, moves, mover
        gc.collect()
    finally:
        server.stop()
        thread.join()


def _targets(row: list[int]) -> dict[str, types.TensorData]:
    return {
        "target_tokens": types.TensorData(data=row, dtype="int64"),
        "weights": types.TensorData(data=[1.0] * len(row), dtype="float32"),
    }
