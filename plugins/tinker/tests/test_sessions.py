"""Sessions: one trains at a time, silent ones end, and what was theirs is given up."""

from __future__ import annotations

import asyncio

from plugins.tinker.tests.clients import Bench, on_bench
from plugins.tinker.tests.policies import NAME


@on_bench(idle_minutes=1.0)
async def test_one_session_trains_at_a_time(bench: Bench) -> None:
    first, second = await bench.begin(), await bench.begin()
    model = await bench.model(first)
    bench.now += 7
    refused = await bench.create(second)
    assert refused.status_code == 400 and refused.json() == {
        "error": f"session {first} trains {model!r}, and this server trains one model at a time; its client was there "
        "7 s ago; close that client, or try again once it has been silent for 35 s",
        "category": "user",
    }
    assert (await bench.post(f"sessions/{first}/finish", {"reason": {"type": "success"}})).status_code == 204
    assert (await bench.post(f"sessions/{first}/finish", {"reason": {"type": "success"}})).status_code == 204
    await bench.model(second)
    assert bench.policy.calls == ["create", "release", "create"]


@on_bench(idle_minutes=5.0)
async def test_a_client_takes_over_from_one_that_sends_no_heartbeats(bench: Bench) -> None:
    gone, there = await bench.begin(), await bench.begin()
    model = await bench.model(gone)
    bench.now += 36
    await bench.model(there)
    assert bench.notices == [f"session {gone} has ended: another one trains, and its client sends no heartbeats"]
    assert (await bench.step(model, 1)).status_code == 410
    assert bench.policy.calls == ["create", "release", "create"]


@on_bench(idle_minutes=1.0)
async def test_a_client_that_vanishes_costs_nothing(bench: Bench) -> None:
    gone, there = await bench.begin(), await bench.begin()
    model, sampler = await bench.model(gone), await bench.sampler(gone)
    never = asyncio.Event()
    bench.policy.drawing = lambda wanted: never.wait()
    await bench.sample(sampler, 0)
    for number in (1, 2, 5):
        await bench.run(model, number)
    waiting = [asyncio.create_task(bench.get(name)) for name in (f"{model}:5", f"{sampler}:0")]
    await bench.get(f"{model}:2")
    bench.now += 40
    await bench.post("session_heartbeat", {"session_id": there})
    bench.now += 40
    bench.service.sweep()
    assert bench.notices == [f"session {gone} has ended: no heartbeat for 1 minutes"]
    sentence = {"error": f"session {gone} has ended", "category": "user"}
    assert [(await each).json() for each in waiting] == [sentence] * 2
    await asyncio.sleep(0)
    assert (bench.promises(), bench.service.sessions.bytes) == ({}, 0)
    statuses = [
        (await bench.post("session_heartbeat", {"session_id": gone})).status_code,
        (await bench.step(model, 6)).status_code,
        (await bench.sample(sampler, 1)).status_code,
        (await bench.get(f"{model}:1")).status_code,
        (await bench.create(gone, 1)).status_code,
    ]
    assert statuses == [410, 410, 404, 404, 410]
    await bench.model(there)
    assert bench.policy.calls == ["create", "sampler", "pass 1", "pass 1", "release", "create"]


@on_bench()
async def test_a_second_model_of_a_session_replaces_the_first(bench: Bench) -> None:
    session = await bench.begin()
    first = await bench.model(session)
    await bench.step(first, 2)  # waits for 1
    second = await bench.model(session, 1)
    given_up = f"model {first!r} is given up: its session has created {second!r}"
    assert (await bench.get(f"{first}:2")).json() == {"error": given_up, "category": "user"}
    late = await bench.step(first, 1)
    assert late.status_code == 404
    assert late.json()["error"] == f"model {first!r} is not trained here any more; this server trains {second!r}"
    assert bench.policy.calls == ["create", "create"]


@on_bench()
async def test_a_refused_model_leaves_the_one_before(bench: Bench) -> None:
    session = await bench.begin()
    first = await bench.model(session)
    await bench.get((await bench.run(first, 1)).json()["request_id"])
    await bench.step(first, 3)  # waits for 2
    refused = await bench.create(session, 1, base_model="nobody/nothing")
    assert refused.status_code == 400 and "base_model='nobody/nothing' is not served here" in refused.json()["error"]
    await bench.run(first, 2)
    assert (await bench.get(f"{first}:3")).json() == {"metrics": {"grad_norm": 4.0}}
    assert bench.policy.calls == ["create", "pass 1", "pass 1", "step"]


@on_bench()
async def test_a_model_that_fails_to_begin_holds_nothing(bench: Bench) -> None:
    session = await bench.begin()
    await bench.model(session)
    bench.policy.refused = "the checkpoint is broken"
    bench.policy.hold.clear()
    failed = await bench.create(session, 1)
    early, waiting = [await bench.run(f"{session}:train:1", number) for number in (1, 3)]  # before its client knows
    bench.policy.hold.set()
    assert (await bench.answer(failed))["error"] == "the checkpoint is broken"
    for each in (early, waiting):
        assert "was not created" in (await bench.answer(each))["error"]
    bench.policy.refused = ""
    model = await bench.model(await bench.begin())
    assert (await bench.post("get_info", {"model_id": model})).json()["model_name"] == NAME
    assert bench.policy.calls == ["create", "create", "create"]


@on_bench()
async def test_work_of_a_session_that_ended_is_not_begun(bench: Bench) -> None:
    session = await bench.begin()
    model = await bench.model(session)
    bench.policy.hold.clear()
    bench.policy.started.clear()
    for number in range(1, 5):
        await bench.run(model, number, first=number)
    await asyncio.to_thread(bench.policy.started.wait)
    await bench.post(f"sessions/{session}/finish", {})
    bench.policy.hold.set()
    await bench.model(await bench.begin())
    assert bench.policy.calls == ["create", "pass 1", "release", "create"]
