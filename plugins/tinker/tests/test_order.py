"""Requests in whatever order they arrive, retried, missing, refused, and after a fatal error."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from corerl.errors import UserError, WorkerDied
from corerl_tinker.order import GAP_SECONDS, Asked, Model, Turns
from plugins.tinker.tests.clients import Bench, on_bench


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(1, 9)), st.integers(1, 9), st.sets(st.integers(1, 8)))
def test_any_order_of_arrival_is_executed_by_number(arriving: list[int], missing: int, alone: set[int]) -> None:
    """Passes that wait together in one turn, and what else there is by itself."""

    async def play() -> list[list[int]]:
        executed: list[list[int]] = []

        async def call(work: Callable[[], Any]) -> Any:
            return work()

        def work(numbers: Sequence[int]) -> Sequence[int]:
            executed.append(list(numbers))
            return numbers

        model = Model(id="m", session="s", turns=Turns(call), clock=lambda: 0.0)

        async def request(number: int) -> None:
            asked = Asked(number, work, None if number in alone else "pass")
            model.add(number, asked)
            assert await asked.answer == number

        tasks = {number: asyncio.create_task(request(number)) for number in arriving if number != missing}
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(chain(*executed)) == [number for number, task in sorted(tasks.items()) if task.done()]
        model.give_up("enough")
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return executed

    turns, begun = asyncio.run(play()), range(1, min(missing, 9))
    assert list(chain(*turns)) == list(begun)
    assert not any(alone & {*turn} for turn in turns if len(turn) > 1)
    if [number for number in arriving if number != missing][-1] == 1:  # as the SDK sends them
        assert len(turns) == sum(each in alone or each == 1 or each - 1 in alone for each in begun)


def test_work_that_answers_too_few_fails_all_given() -> None:
    async def play() -> list[Any]:
        async def call(work: Callable[[], Any]) -> Any:
            return work()

        turns = Turns(call)
        asking = [turns.ask(lambda whats: whats[:1], number, "pass") for number in range(2)]
        return await asyncio.gather(*asking, return_exceptions=True)

    assert [str(each) for each in asyncio.run(play())] == ["1 answers to 2 requests"] * 2


def test_nothing_is_done_for_who_has_gone() -> None:
    """And what was begun for who goes meanwhile is cancelled."""
    done, begun = list[list[str]](), concurrent.futures.Future[None]()

    def work(names: Sequence[str]) -> Sequence[Any]:
        done.append(list(names))
        return [begun if name == "goes meanwhile" else name for name in names]

    async def play() -> list[str]:
        turn, go = asyncio.Event(), asyncio.Event()

        async def call(work: Callable[[], Any]) -> Any:
            turn.set()
            await go.wait()
            return work()

        turns = Turns(call)
        first = asyncio.create_task(turns.ask(work, "goes meanwhile", "first"))
        await turn.wait()
        names = ("gone", "one", "alone", "two")
        others = [asyncio.create_task(turns.ask(work, name, "alone" if name == "alone" else "key")) for name in names]
        await asyncio.sleep(0)
        for task in (first, others[0], others[2]):
            task.cancel()
        go.set()
        return await asyncio.gather(others[1], others[3])

    assert asyncio.run(play()) == ["one", "two"]
    assert done == [["goes meanwhile"], ["one", "two"]] and begun.cancelled()


@on_bench()
async def test_a_repeated_request_is_the_same_promise(bench: Bench) -> None:
    session = await bench.begin()
    model = await bench.model(session)
    assert (await bench.create(session)).json()["request_id"] == f"{model}:0"
    bench.policy.hold.clear()
    names = {(await bench.run(model, 1)).json()["request_id"] for _ in range(3)}
    bench.policy.hold.set()
    (name,) = names
    answers = {(await bench.get(name)).content for _ in range(2)}
    assert len(answers) == 1 and (await bench.run(model, 1)).json()["request_id"] == name
    assert await bench.answer(await bench.step(model, 2)) == {"metrics": {"grad_norm": 2.0}}
    assert bench.policy.calls == ["create", "pass 1", "step"]


@on_bench()
async def test_a_gap_that_nobody_fills_ends(bench: Bench) -> None:
    model = await bench.model(await bench.begin())
    bench.now += 2 * GAP_SECONDS  # while nothing waits
    await bench.step(model, 3)
    await asyncio.sleep(0)
    bench.service.sweep()
    for _ in range(10):  # in which a refusal would reach its promise
        await asyncio.sleep(0)
    assert bench.promises()[f"{model}:3"].answer is None
    for _ in range(2):  # the session has heartbeats meanwhile
        bench.now += GAP_SECONDS / 2
        await bench.post("get_info", {"model_id": model})
        bench.service.sweep()
    answer = await bench.answer(f"{model}:3")
    assert answer["category"] == "user"
    assert answer["error"].startswith("request 1 of this model has not arrived in 600 s")
    answer = await bench.answer(await bench.step(model, 4))
    assert answer["error"].startswith("the step was not taken, and its gradients are dropped; request 1 of this model")
    assert await bench.answer(await bench.step(model, 5)) == {"metrics": {"grad_norm": 0.0}}


@on_bench()
async def test_what_is_wrong_with_a_request_uses_its_number_up(bench: Bench) -> None:
    model = await bench.model(await bench.begin())
    await bench.step(model, 1, adam_params={"learning_rate": "fast"})
    other = {"model_id": model, "seq_id": 2, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    await bench.post("optim_step", other)
    await bench.post("save_weights", {"model_id": model, "seq_id": 3, "path": "../../etc"})
    await bench.step(model, 4)
    for number, ttl in ((5, 0), (6, 10**400)):
        fields = {"model_id": model, "seq_id": number, "path": "x", "ttl_seconds": ttl}
        await bench.post("save_weights" if ttl else "save_weights_for_sampler", fields)
        assert "wanted 1 to 1000000000, or null" in (await bench.answer(f"{model}:{number}"))["error"]
    errors = [(await bench.answer(f"{model}:{number}")).get("error", "") for number in (1, 2, 3, 4)]
    assert errors[0].startswith("adam_params.") and errors[0].endswith("got 'fast'")
    assert errors[1] == "the optimizer 'dimuon' is not served; use AdamParams"
    assert "/weights/../../etc', wanted tinker://RUN/weights/NAME" in errors[2] and errors[3] == ""


@on_bench()
async def test_what_a_sampler_asks_of_ranks_waits_its_turn(bench: Bench) -> None:
    session = await bench.begin()
    model, sampler = await bench.model(session), await bench.sampler(session)
    bench.policy.hold.clear()
    await bench.run(model, 1)
    name = (await bench.sample(sampler, 0, prompt_logprobs=True)).json()["request_id"]
    await asyncio.sleep(0)
    await bench.step(model, 2)
    bench.policy.hold.set()
    assert [(await bench.get(each)).status_code for each in (f"{model}:2", name)] == [200, 200]
    assert bench.policy.calls == ["create", "sampler", "pass 1", "score", "step"]


def lost(why: str) -> str:
    return f"the model is lost: {why}; restart `corerl serve`, and resume from the last saved state"


@on_bench()
async def test_a_fatal_error_reaches_everyone_who_waits_or_comes(bench: Bench) -> None:
    session = await bench.begin()
    model = await bench.model(session)
    sampler = await bench.sampler(session)
    never = asyncio.Event()
    bench.policy.drawing = lambda wanted: never.wait()
    bench.policy.hold.clear()
    bench.policy.dies = WorkerDied("rank 1 (pid 7) was killed by SIGKILL in forward_backward")
    names = [(await bench.run(model, 1)).json()["request_id"]]
    waiting = asyncio.create_task(bench.get(names[0]))
    names += [(await bench.step(model, number)).json()["request_id"] for number in (2, 9)]  # and one behind a gap
    names.append((await bench.sample(sampler, 0)).json()["request_id"])
    await asyncio.sleep(0)
    bench.policy.drawing = None
    names.append((await bench.sample(sampler, 5, prompt_logprobs=True)).json()["request_id"])  # which waits its turn
    await asyncio.sleep(0)
    bench.policy.hold.set()
    await waiting
    names.append((await bench.step(model, 3)).json()["request_id"])
    names.append((await bench.sample(sampler, 1)).json()["request_id"])
    names.append((await bench.create(session, 1)).json()["request_id"])
    for name in names:
        answer = await bench.answer(name)
        assert answer["category"] == "server", name
        assert answer["error"] == lost(str(bench.policy.dies))
    assert bench.notices == [answer["error"]]
    fields = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    assert (await bench.post("create_session", fields)).json()["error_message"] == answer["error"]
    assert (await bench.create_sampler(session, 1)).json()["error"] == answer["error"]
    assert bench.policy.calls == ["create", "sampler", "pass 1"]


@on_bench()
async def test_an_error_that_ended_the_ranks_is_no_refusal(bench: Bench) -> None:
    model = await bench.model(await bench.begin())
    bench.policy.dies = UserError("the files do not fit the model")
    errors = []
    for number, ended in ((1, False), (2, True), (3, True)):
        bench.policy.ranks_ended = ended
        errors.append(await bench.answer(await bench.run(model, number)))
    what = "the files do not fit the model"
    assert errors[0] == {"error": what, "category": "user"}
    assert errors[1] == errors[2] == {"error": lost(what), "category": "server"}
    assert bench.notices == [lost(what)]
