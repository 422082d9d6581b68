"""Promises: long polls, memory, and what is forgotten when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from starlette.responses import Response
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ModelInput,
    SampleRequest,
    TensorData,
)

from corerl_tinker import service
from corerl_tinker.requests import Refused
from corerl_tinker.sessions import KEPT_SECONDS, LEAST_BYTES, Sessions
from plugins.tinker.tests.clients import Bench, on_bench


@on_bench()
async def test_what_is_not_done_is_asked_for_again(bench: Bench) -> None:
    model = await bench.model(await bench.begin())
    bench.policy.hold.clear()
    await bench.run(model, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "POLL_SECONDS", 0.01)
        assert (await bench.get(f"{model}:1")).status_code == 408
    bench.policy.hold.set()
    found = await bench.get(f"{model}:1")
    assert (found.status_code, found.headers["content-type"]) == (200, "application/x-protobuf")


@on_bench()
async def test_a_result_is_kept_ten_minutes_after_its_fetch(bench: Bench) -> None:
    session = await bench.begin()
    model, sampler = await bench.model(session), await bench.sampler(session)
    for number in (1, 2):
        await bench.step(model, number)
    await bench.sample(sampler, 0)
    assert bench.service.sessions.bytes == len(bench.promises()) * LEAST_BYTES == 5 * LEAST_BYTES
    assert [(await bench.get(name)).status_code for name in (f"{model}:1", f"{sampler}:0")] == [200, 200]
    for _ in range(3):
        bench.service.sweep()
        assert (await bench.get(f"{model}:1")).status_code == 200  # which does not prolong its life
        bench.now += KEPT_SECONDS / 3
    bench.service.sweep()
    assert [(await bench.get(name)).status_code for name in (f"{model}:1", f"{sampler}:0")] == [410, 410]
    assert (await bench.get(f"{model}:2")).status_code == 200
    assert (await bench.step(model, 1)).status_code == 410  # what is forgotten is not executed again
    assert (await bench.get(f"{model}:x")).status_code == 410
    for name in ("session-0:train:0:1", "nobody"):
        found = await bench.get(name)
        assert found.status_code == 404 and "has ended, or is one of an earlier server" in found.json()["error"]
    assert bench.policy.calls.count("step") == 2 and bench.service.sessions.bytes == LEAST_BYTES  # that of step 2


@on_bench()
async def test_one_poll_tells_which_samples_are_done(bench: Bench) -> None:
    sampler = await bench.sampler(await bench.begin())
    gates = [asyncio.Event() for _ in range(4)]

    async def drawing(wanted: SampleRequest) -> None:
        await gates[wanted.seq_id or 0].wait()
        if wanted.seq_id == 3:
            raise Refused("not this one")

    bench.policy.drawing = drawing
    for number in range(4):
        await bench.sample(sampler, number)

    async def poll(seen: int, *fetched: str, clone: int = 0, **more: float) -> Any:
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
        fields = {"target": target, "prev_cursor": seen, "retrieved_request_ids": list(fetched), **more}
        return (await bench.post("retrieve_futures", fields)).json()

    assert await poll(0, timeout=0) == {"completions": [], "cursor": 0}
    polling = asyncio.create_task(poll(0))
    for number in (2, 0):
        gates[number].set()
    found = await polling
    assert {each["request_id"] for each in found["completions"]} == {f"{sampler}:2", f"{sampler}:0"}
    for each in found["completions"]:
        answer = await bench.get(each["request_id"])
        assert each["state"] == "finished" and len(answer.content) <= each["response_payload_uncompressed_size"]
    assert await poll(0, timeout=0) == found  # whose answer was lost
    gates[3].set()
    refused = await poll(found["cursor"])
    assert [each["request_id"] for each in refused["completions"]] == [f"{sampler}:3"]
    assert "not this one" in (await bench.get(f"{sampler}:3")).json()["error"]
    held = bench.service.sessions.bytes
    last = refused["cursor"]
    assert await poll(last, f"{sampler}:2", f"{sampler}:1", timeout=0) == {"completions": [], "cursor": last}
    assert bench.service.sessions.bytes == held - LEAST_BYTES  # the other one still waits
    assert (await bench.get(f"{sampler}:2")).status_code == 410
    bench.policy.drawing = None
    await bench.get((await bench.sample(sampler, 2 * 10**9 + 5)).json()["request_id"])  # of a client's second copy
    of_copies = [(await poll(last, clone=clone, timeout=0))["completions"] for clone in range(3)]
    assert [len(each) for each in of_copies] == [0, 0, 1]
    assert (await bench.post("retrieve_futures", {"target": {"sampling_session_id": "nobody"}})).status_code == 404


@on_bench()
async def test_memory_is_that_of_what_was_read(bench: Bench) -> None:
    nothing = torch.zeros(2, 2**18)
    session = await bench.begin()
    model, sampler = await bench.model(session), await bench.sampler(session)
    before, bench.policy.drawing = bench.service.sessions.bytes, lambda wanted: asyncio.Event().wait()
    await bench.sample(sampler, 0, num_samples=1000)  # of two tokens
    assert bench.service.sessions.bytes == before + 1000 * 2 * 8
    bench.policy.hold.clear()
    await bench.run(model, 1)
    inputs = {"target_tokens": nothing.long(), "weights": nothing}
    sparse = {name: TensorData.from_torch_sparse(each) for name, each in inputs.items()}
    datum = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs=sparse)
    given = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=2)
    body = forward_backward_request_to_proto(request).SerializeToString()
    await bench.post("forward_backward", body)
    assert len(body) < 1000 and bench.service.sessions.bytes > 3 * 2**18 * (4 + 4)
    await bench.post(f"sessions/{session}/finish", {})
    assert bench.service.sessions.bytes == 0


def test_more_than_fits_waits_in_the_client() -> None:
    async def play() -> None:
        sessions = Sessions(most_bytes=10_000, notify=print, clock=lambda: 0.0)
        one, other = (sessions.of(sessions.begin()) for _ in range(2))
        go = asyncio.Event()

        async def answer() -> Response:
            await go.wait()
            return Response(bytes(3000))

        first = sessions.promise(one, "first", answer, size=6000)
        with pytest.raises(Refused, match="requests and results hold 0 MiB of serve.memory_mib") as refused:
            sessions.promise(other, "second", answer, size=6000)
        assert refused.value.status == 429  # which the SDK repeats
        waits = sessions.promise(one, "next in line", answer, size=6000, urgent=True)
        assert sessions.bytes == 12_000
        go.set()
        assert (await sessions.wait("first", first, 1.0)).body == bytes(3000)
        await sessions.wait("next in line", waits, 1.0)
        assert sessions.bytes == 6000 and sessions.promise(one, "first", answer) is first
        sessions.promise(other, "third", answer, size=8000)  # in place of what was fetched
        assert sessions.bytes == 8000 and not one.promises
        sessions.end(other.id)
        assert sessions.bytes == 0

    asyncio.run(play())
