"""Requests without the SDK: what it would not send, and what it does not show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from corerl.rollout import EventLoop
from corerl_tinker.app import app
from corerl_tinker.options import ServeOptions
from corerl_tinker.service import Service
from corerl_tinker.sessions import Promise
from plugins.tinker.tests.conftest import KEY
from plugins.tinker.tests.policies import NAME, OneNumber

Reply = httpx.Response


class Bench:
    """A service and its app in the event loop of a test, a clock that the test moves, and requests."""

    def __init__(self, loop: EventLoop, **options: Any) -> None:
        self.policy, self.notices, self.now = OneNumber(), list[str](), 0.0
        self.options = ServeOptions(name=NAME, aliases=("other/name",), **options)
        self.service = Service(self.policy, self.options, loop, notify=self.notices.append, clock=lambda: self.now)
        self.app = app(self.service, key=KEY, hosts=("here.example",))
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers={"X-API-Key": KEY})

    def promises(self) -> dict[str, Promise]:
        """All that is kept, by the names of the requests."""
        found: dict[str, Promise] = {}
        for session in self.service.sessions._sessions.values():
            found |= session.promises
        return found

    async def post(self, path: str, fields: Mapping[str, Any] | bytes, **headers: str) -> Reply:
        body = {"content": fields} if isinstance(fields, bytes) else {"json": fields}
        return await self.http.post(f"/api/v1/{path}", headers=headers, **body)  # type: ignore[arg-type]

    async def get(self, name: str) -> Reply:
        return await self.post("retrieve_future", {"request_id": name})

    async def answer(self, asked: Reply | str) -> Any:
        """What a request says in the end: one that was sent, or of this name."""
        return (await self.get(asked if isinstance(asked, str) else asked.json()["request_id"])).json()

    async def begin(self) -> str:
        fields = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        return str((await self.post("create_session", fields)).json()["session_id"])

    async def create(self, session: str, number: int = 0, **fields: Any) -> Reply:
        asked = {"session_id": session, "model_seq_id": number, "base_model": NAME, **fields}
        return await self.post("create_model", asked)

    async def model(self, session: str, number: int = 0) -> str:
        """The id of a model that is there."""
        await self.answer(await self.create(session, number))
        return f"{session}:train:{number}"

    async def step(self, model: str, number: int, **fields: Any) -> Reply:
        return await self.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": {}, **fields})

    async def run(self, model: str, number: int, *, first: int = 1, loss: str = "cross_entropy") -> Reply:
        return await self.post("forward_backward", pass_body(model, number, first=first, loss=loss))

    async def sample(self, sampler: str, number: int, **fields: Any) -> Reply:
        prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
        asked = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": {}, **fields}
        return await self.post("asample", asked)

    async def sampler(self, session: str) -> str:
        return str((await self.create_sampler(session)).json()["sampling_session_id"])

    async def create_sampler(self, session: str, number: int = 0) -> Reply:
        fields = {"session_id": session, "sampling_session_seq_id": number, "base_model": NAME}
        return await self.post("create_sampling_session", fields)


def pass_body(model: str, number: int, *, first: int = 1, tokens: int = 2, loss: str = "cross_entropy") -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(first, first + tokens, dtype=np.int32).tobytes()
    targets = np.arange(first, first + tokens, dtype=np.int64)
    ids = pb.Tensor(dense=targets.tobytes(), dtype=pb.DTYPE_INT64, shape=[tokens])
    datum.loss_fn_inputs["target_tokens"].CopyFrom(ids)
    weights = pb.Tensor(dense=np.ones(tokens, np.float32).tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[tokens])
    datum.loss_fn_inputs["weights"].CopyFrom(weights)
    return message.SerializeToString()


def on_bench(**options: Any) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """A test as a coroutine of the event loop that serves; the thread that runs the test drives the group."""

    def decorated(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def run() -> None:
            loop = EventLoop("tested")
            bench = Bench(loop, **options)

            async def play() -> None:
                working = asyncio.create_task(bench.service.work())
                try:
                    async with bench.http:
                        await test(bench)
                finally:
                    bench.policy.hold.set()
                    working.cancel()

            try:
                loop.run(play())
            finally:
                loop.close()
                bench.policy.directory.cleanup()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorated
