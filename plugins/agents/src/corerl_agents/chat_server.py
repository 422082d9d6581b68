"""An OpenAI-compatible server in the driver: serves chat requests, with one base URL per episode."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import itertools
import json
import secrets
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from corerl.messages import one_line
from corerl.rollout import EventLoop
from corerl.types import IntArray
from corerl_agents.chat_requests import ChatRequest, read_request
from corerl_agents.refused import Refused

if TYPE_CHECKING:
    from starlette.applications import Starlette

MODEL = "policy"  # the model's name in answers; requests may use any name
API_KEY = "none"  # clients require one; what protects an episode is its unguessable path
CLOSED = 499  # the status for a client that has gone, which nobody reads
WAITING = 1024  # connections that may wait: many episodes may start and connect at the same moment
IDLE = 24 * 3600  # seconds; a server that closes a connection earlier may do so as a client sends its next request


@frozen(kw_only=True, eq=False)
class ChatAnswer:
    """The answer to a `ChatRequest`."""

    text: str
    reasoning: str = ""  # where it is not in the text
    tool_calls: Sequence[Mapping[str, Any]] = ()  # in OpenAI's shape
    finish_reason: str  # stop, tool_calls or length
    prompt_token_ids: IntArray  # [n] before the answer
    token_ids: IntArray = field(factory=lambda: np.zeros(0, np.int64))  # [m]
    tokens: Sequence[str] = ()  # [m] as texts, if log-probs were asked for
    logprobs: Sequence[float] = ()  # [m] likewise


Answering = Callable[[ChatRequest], Awaitable[ChatAnswer]]  # awaited in the server's loop; raises Refused
Refusing = Callable[[str], None]  # called with the message of each refused request


@frozen(kw_only=True)
class _Reply:
    status: int  # of HTTP
    content: dict[str, Any]
    request: ChatRequest | None = None  # the one that is answered; None where it is not


class ChatServer:
    """The server. Listens on localhost only, from construction until `close`. Any thread may call it."""

    def __init__(self, loop: EventLoop, *, temperature: float, top_p: float, top_k: int = 0) -> None:
        """Serves in `loop`, which must run until `close`. Requests may repeat the values of sampling and are refused
        any others."""
        import uvicorn  # a tenth of a second, which only runs with episodes pay

        self._loop = loop
        self._sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._open: dict[str, tuple[Answering, Refusing]] = {}
        self._numbers = itertools.count()  # numbers the answers
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=WAITING)
        self._port = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                _app(self),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="critical",  # the run reports what matters itself
                access_log=False,
                proxy_headers=False,
                backlog=WAITING,
                timeout_keep_alive=IDLE,
            )
        )
        self._serving = loop.begin(self._serve())

    def open(self, answering: Answering, refusing: Refusing = lambda message: None) -> str:
        """Return a new base URL; `answering` handles its requests until `shut`."""
        name = secrets.token_hex(16)
        self._open[name] = answering, refusing
        return f"http://127.0.0.1:{self._port}/{name}/v1"

    def shut(self, base_url: str) -> None:
        """Refuse all further requests to this base URL."""
        del self._open[_name(base_url)]

    def ask(self, base_url: str, body: Mapping[str, Any]) -> concurrent.futures.Future[dict[str, Any]]:
        """What a POST of this body to `base_url`/chat/completions is answered, without a socket. Whoever cancels the
        future is a client that has gone."""
        # As JSON, like a client's, so that what a function does to its messages changes nothing here.
        return self._loop.begin(self._answered(_name(base_url), json.dumps(body)))

    async def _answered(self, name: str, body: str) -> dict[str, Any]:
        return (await self.reply(name, body)).content

    def close(self) -> None:
        """Serve no longer. Idempotent. In the loop's own thread, returns before the port is closed."""
        self._server.should_exit = True
        self._server.force_exit = True  # wait for no client
        if not self._loop.inside:
            with contextlib.suppress(concurrent.futures.CancelledError):  # the loop was closed first
                self._serving.result()

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()  # where the loop was closed first

    def models(self, name: str) -> _Reply:
        """Answer a GET to the models path of the episode of this name."""
        if name not in self._open:
            return self.lost("GET", f"/{name}/v1/models", 404)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "corerl"}
        return _Reply(status=200, content={"object": "list", "data": [model]})

    def lost(self, method: str, path: str, status: int) -> _Reply:
        """Answer a request to a path that does not exist, or not with this method."""
        name = path.removeprefix("/").partition("/")[0]
        known = f"no such path; this server has POST /{name}/v1/chat/completions and GET /{name}/v1/models"
        _, refusing = self._open.get(name, (None, None))
        why = _NOBODY if refusing is None else known
        return _refusal(Refused(f"{method} {path}: {why}", status=status, code="not_found"), refusing)

    async def reply(self, name: str, body: str | bytes) -> _Reply:
        """Answer a POST to its chat path."""
        answering, refusing = self._open.get(name, (None, None))
        try:
            if answering is None:
                raise Refused(f"POST /{name}/v1/chat/completions: {_NOBODY}", status=404, code="not_found")
            request = read_request(body, self._sampling)
            content = _completion(await answering(request), request, number=next(self._numbers))
            return _Reply(status=200, content=content, request=request)
        except Refused as refused:
            return _refusal(refused, refusing)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # say, of a chat template: its text goes to the client; SystemExit too
            traceback.print_exception(error)  # the traceback is for whoever runs this
            said = {"message": one_line(error), "type": "server_error", "param": None, "code": "failed"}
            return _Reply(status=500, content={"error": said})


_NOBODY = "no running episode has this URL; send requests to an episode's base_url + '/chat/completions'"


def _refusal(refused: Refused, refusing: Refusing | None) -> _Reply:
    if refusing is not None:
        refusing(refused.message)
    said = {"message": refused.message, "type": "invalid_request_error", "param": None, "code": refused.code}
    return _Reply(status=refused.status, content={"error": said})


def _app(server: ChatServer) -> Starlette:
    """The paths of the server."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    def response(reply: _Reply) -> Response:
        if reply.request is not None and reply.request.stream:
            events = _events(reply.content, usage=reply.request.stream_usage)
            return Response(events, reply.status, media_type="text/event-stream")
        return Response(json.dumps(reply.content), reply.status, media_type="application/json")

    async def chat(request: Request) -> Response:
        answering = asyncio.create_task(server.reply(request.path_params["name"], await request.body()))
        gone = asyncio.create_task(closed(request))
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            return response(answering.result()) if answering.done() else Response(status_code=CLOSED)
        finally:
            answering.cancel()
            gone.cancel()

    async def closed(request: Request) -> None:
        """Return once the client has closed the connection of a request that was received."""
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def models(request: Request) -> Response:
        return response(server.models(request.path_params["name"]))

    async def lost(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return response(server.lost(request.method, request.url.path, error.status_code))

    return Starlette(
        routes=[
            Route("/{name}/v1/chat/completions", chat, methods=["POST"]),
            Route("/{name}/v1/models", models, methods=["GET"]),
        ],
        exception_handlers={404: lost, 405: lost},
    )


def _name(base_url: str) -> str:
    return base_url.split("/")[3]  # http://host:port/name/v1


def _completion(answer: ChatAnswer, request: ChatRequest, *, number: int) -> dict[str, Any]:
    """Format the answer as OpenAI's `chat.completion`; token ids are where vLLM has them."""
    before, said = len(answer.prompt_token_ids), len(answer.token_ids)
    calls = {"tool_calls": copy.deepcopy(list(answer.tool_calls))} if answer.tool_calls else {}  # the client's own
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    message = {"role": "assistant", "content": answer.text or (None if calls else ""), **reasoning, **calls}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": answer.finish_reason,
                "logprobs": {"content": _logprobs(answer)} if request.logprobs else None,
                **({"token_ids": answer.token_ids.tolist()} if request.token_ids else {}),
            }
        ],
        "usage": {"prompt_tokens": before, "completion_tokens": said, "total_tokens": before + said},
        **({"prompt_token_ids": answer.prompt_token_ids.tolist()} if request.token_ids else {}),
    }


def _logprobs(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]


def _events(completion: Mapping[str, Any], *, usage: bool) -> bytes:
    """The completion as server-sent events: one chunk with all of it, and one with the usage if that is asked for."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    streamed = {key: value for key, value in choice.items() if key != "message"}
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    ids = {key: value for key, value in completion.items() if key == "prompt_token_ids"}
    chunks = [{**head, "choices": [{**streamed, "delta": delta}], **ids}]
    if usage:
        chunks = [{**chunks[0], "usage": None}, {**head, "choices": [], "usage": completion["usage"]}]
    return b"".join(b"data: %s\n\n" % said for said in (*(json.dumps(each).encode() for each in chunks), b"[DONE]"))
