"""HTTP: who may come in, how large bodies may be, and that every refusal is a 4xx with a sentence."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import MutableMapping
from typing import Any

from corerl_tinker import wire
from plugins.tinker.tests.clients import Bench, on_bench, pass_body
from plugins.tinker.tests.conftest import KEY


@on_bench()
async def test_only_the_key_opens_every_route(bench: Bench) -> None:
    for key in ("", KEY[:-1], KEY + "x", "ключ".encode().decode("latin-1")):
        for path in ("healthz", "training_runs/a", "samplers/base"):
            found = await bench.http.get(f"/api/v1/{path}", headers={"X-API-Key": key.encode("latin-1")})
            assert found.status_code == 401 and "TINKER_API_KEY" in found.json()["error"]
    assert (await bench.http.get("/api/v1/healthz")).json() == {"status": "ok"}


@on_bench()
async def test_a_name_that_is_not_the_servers_is_refused(bench: Bench) -> None:
    hosts = {
        "localhost:8420": 200,
        "127.0.0.1:8420": 200,
        "[::1]:8420": 200,
        "10.0.0.7": 200,
        "Here.Example:8420": 200,
        "rebound.example": 403,
        "localhost.rebound.example": 403,
        "127.0.0.1.rebound.example:8420": 403,
        "rebound_here.example": 403,  # not a name by the rules, and browsers ask for it
        "[": 403,
        "": 403,
    }
    for host, status in hosts.items():
        found = await bench.http.get("/api/v1/healthz", headers={"Host": host})
        assert found.status_code == status, host
        assert not [name for name in found.headers if name.startswith("access-control")]
    assert (await bench.http.options("/api/v1/healthz", headers={"Origin": "http://a.example"})).status_code == 405


@on_bench()
async def test_what_is_not_served_is_refused_with_a_sentence(bench: Bench) -> None:
    session = await bench.begin()
    await bench.model(session)
    sampler = await bench.sampler(session)
    of_targets = {"data": [3], "dtype": "int64", "shape": [1, 1]}
    image = {"chunks": [{"type": "image", "data": "AAAA", "format": "png"}]}
    refused = [
        (await bench.post("copy_weights", {}), 404, "POST /api/v1/copy_weights is not served here"),
        (await bench.http.get("/api/v1/create_session"), 405, "GET /api/v1/create_session is not served here"),
        (await bench.post("create_session", {}), 400, "tags: Field required, got {}"),
        (await bench.create(session, 1, new_field=3), 400, "new_field: Extra inputs are not permitted, got 3"),
        (await bench.sample(sampler, 1, prompt=image), 400, "a chunk of type 'image'; this server reads text only"),
        (await bench.sample(sampler, 1, topk_sample_logprobs=3), 400, "topk_sample_logprobs is not served; ask for"),
        (await bench.sample(sampler, 1, target_prompt_logprobs=of_targets), 400, "target_prompt_logprobs is not ser"),
        (await bench.sample(sampler, 1, seq_id=None), 400, "seq_id is missing; number the requests"),
        (await bench.sample(sampler, 1, num_samples=10**6), 400, "num_samples=1000000 is out of range, at most 4096"),
        (await bench.sample(sampler, 1, sampling_params={"top_p": 0.0}), 400, "top_p=0.0 is out of range"),
        (await bench.sample(sampler, 1, sampling_params={"stop": [2**70]}), 400, "stop=[1180591620717411303424] is"),
        (await bench.sample(sampler, 1, sampling_params={"min_p": 0.1}), 400, "sampling_params.min_p is not served"),
        (await bench.sample("elsewhere", 1), 404, "session 'elsewhere' has ended"),
        (await bench.post("weights_info", {"tinker_path": "tinker://a/weights/b"}), 404, "has no checkpoint here"),
        (await bench.post("weights_info", {"tinker_path": "tinker://../weights/a"}), 400, "wanted tinker://RUN/w"),
    ]
    for found, status, sentence in refused:
        assert found.status_code == status and sentence in found.json()["error"], found.text
    assert (await bench.create(session, 1, new_field=0)).status_code == 200  # of a later SDK, and not used


@on_bench()
async def test_what_no_client_sends_and_faults_are_no_silent_retry(bench: Bench) -> None:
    bench.policy.checkpoints.run = lambda name: 1 // 0  # type: ignore[assignment, method-assign, return-value]
    with contextlib.redirect_stderr(io.StringIO()) as console:
        failed = [
            (await bench.http.get("/api/v1/training_runs/a"), "ZeroDivisionError"),
            (await bench.post("create_session", b"{nothing"), "JSONDecodeError"),
            (await bench.post("create_session", b"[" * 10**5), "RecursionError"),
            (await bench.post("create_session", b"[1]"), "AttributeError"),
            (await bench.post("forward_backward", b"\xff"), "DecodeError"),
            (await bench.post("optim_step", {"seq_id": 1}), "KeyError"),
            (await bench.post("weights_info", {"tinker_path": 7}), "TypeError"),
        ]
    for found, error in failed:
        assert found.status_code == 422  # and no 5xx, which clients repeat for minutes
        assert found.json()["error"].startswith(f"the server cannot answer this: {error}")
    assert "1 // 0" in console.getvalue()


@on_bench()
async def test_bodies_may_have_64_mib_and_no_more(bench: Bench) -> None:
    model = await bench.model(await bench.begin())
    tokens = 4_000_000  # of 16 bytes each, with their target and weight
    large = pass_body(model, 1, tokens=tokens)
    assert 0.9 * wire.MOST_BYTES < len(large) < wire.MOST_BYTES
    answer = await bench.get((await bench.post("forward_backward", large)).json()["request_id"])
    assert answer.status_code == 200 and len(answer.content) > 4 * tokens
    larger = pass_body(model, 2, tokens=tokens * 11 // 10)
    found = await bench.post("forward_backward", larger)
    assert found.status_code == 413 and "more than 67108864 bytes" in found.json()["error"]
    text = json.dumps({"tags": ["x" * 17 * 2**20]}).encode()
    assert (await bench.post("create_session", text)).status_code == 413
    assert (await bench.get(f"{model}:2")).status_code == 410  # which is not known


@on_bench()
async def test_a_client_that_leaves_amid_a_body_is_no_fault(bench: Bench) -> None:
    parts = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return next(parts)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"x-api-key", KEY.encode())]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/forward_backward", "query_string": b""}
    scope["headers"] = headers
    with contextlib.redirect_stderr(io.StringIO()) as console:
        await bench.app(scope, receive, send)
    assert (sent[0]["status"], console.getvalue()) == (499, "")
