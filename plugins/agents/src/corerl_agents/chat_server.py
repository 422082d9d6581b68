"""The server in the driver that clients ask, in any of the dialects, with one base URL per episode."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import secrets
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from corerl.messages import one_line
from corerl.rollout import EventLoop
from corerl_agents.chat_requests import Answering, OnPiece, Piece
from corerl_agents.dialects import DIALECTS, Dialect
from corerl_agents.dialects.base import MODEL
from corerl_agents.dialects.chat import CHAT
from corerl_agents.refused import Refused

if TYPE_CHECKING:
    from starlette.applications import Starlette

LOOPBACK = "127.0.0.1"
API_KEY = "none"  # clients require one; what protects an episode is its unguessable path
CLOSED = 499  # the status for a client that has gone, which nobody reads
WAITING = 1024  # connections that may wait: many episodes may start and connect at the same moment
IDLE = 24 * 3600  # seconds; a server that closes a connection earlier may do so as a client sends its next request

Refusing = Callable[[str], None]  # called with the message of each refused request
Rewarding = Callable[[bytes], None]  # called with the body of each posted reward; raises Refused
REWARD = "reward"  # the path, behind an episode's base URL


@frozen(kw_only=True)
class _Reply:
    status: int  # of HTTP
    content: dict[str, Any]
    events: bytes = b""  # with which a stream ends


class ChatServer:
    """The server. Listens from construction until `close`, at one address: only this machine reaches the default. Any
    thread may call it."""

    def __init__(
        self, loop: EventLoop, *, temperature: float, top_p: float, top_k: int = 0, address: str = LOOPBACK
    ) -> None:
        """Serves in `loop`, which must run until `close`. Requests may repeat the values of sampling and are refused
        any others."""
        import uvicorn  # a tenth of a second, which only runs with episodes pay

        self._loop = loop
        self._sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._open: dict[str, tuple[Answering, Refusing]] = {}
        self._rewarding: dict[str, Rewarding] = {}  # likewise by name
        self._numbers = itertools.count()  # numbers the answers
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=WAITING)
        host = f"[{address}]" if ":" in address else address
        self._url = f"http://{host}:{self._socket.getsockname()[1]}"
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

    def open(
        self,
        answering: Answering,
        refusing: Refusing = lambda message: None,
        rewarding: Rewarding | None = None,
    ) -> str:
        """Return a new base URL; `answering` handles its requests until `shut`, and `rewarding` posted rewards."""
        name = secrets.token_hex(16)
        self._open[name] = answering, refusing
        if rewarding is not None:
            self._rewarding[name] = rewarding
        return f"{self._url}/{name}/v1"

    def shut(self, base_url: str) -> None:
        """Refuse all further requests to this base URL."""
        del self._open[_name(base_url)]
        self._rewarding.pop(_name(base_url), None)

    def ask(self, base_url: str, body: Mapping[str, Any]) -> concurrent.futures.Future[dict[str, Any]]:
        """What a POST of this body to `base_url`/chat/completions is answered, without a socket. Whoever cancels the
        future is a client that has gone."""
        # As JSON, like a client's, so that what a function does to its messages changes nothing here.
        return self._loop.begin(self._answered(_name(base_url), json.dumps(body)))

    async def _answered(self, name: str, body: str) -> dict[str, Any]:
        return (await self.reply(name, body, CHAT)).content

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

    def reward(self, name: str, body: bytes) -> _Reply:
        """Answer a POST of a reward to the episode of this name."""
        try:
            if (rewarding := self._rewarding.get(name)) is None:
                over = "no running episode has this URL: a reward is posted before its episode ends"
                raise Refused(f"POST /{name}/v1/{REWARD}: {over}", status=404, code="not_found")
            rewarding(body)
            return _Reply(status=200, content={"object": "reward"})
        except Refused as refused:
            _, refusing = self._open.get(name, (None, None))
            return _refusal(refused, refusing, CHAT)

    def lost(self, method: str, path: str, status: int) -> _Reply:
        """Answer a request to a path that does not exist, or not with this method."""
        name = path.removeprefix("/").partition("/")[0]
        posts = ", ".join(f"POST /{name}/v1/{path}" for path in (*(dialect.path for dialect in DIALECTS), REWARD))
        known = f"no such path; this server has {posts} and GET /{name}/v1/models"
        _, refusing = self._open.get(name, (None, None))
        why = _NOBODY if refusing is None else known
        return _refusal(Refused(f"{method} {path}: {why}", status=status, code="not_found"), refusing, CHAT)

    async def reply(
        self, name: str, body: str | bytes, dialect: Dialect, sending: Callable[[bytes], None] | None = None
    ) -> _Reply:
        """Answer a POST to the path of this dialect; `sending` gets a stream as far as it comes before its end."""
        answering, refusing = self._open.get(name, (None, None))
        try:
            if answering is None:
                raise Refused(f"POST /{name}/v1/{dialect.path}: {_NOBODY}", status=404, code="not_found")
            request = dialect.read(body, self._sampling)
            number = next(self._numbers)
            if not request.stream or dialect.stream is None or sending is None:
                answer = await answering(request, _unheard)
                return _Reply(status=200, content=dialect.written(answer, request, number))
            stream = dialect.stream(request, number)
            answer = await answering(request, _sender(stream.piece, sending))
            return _Reply(status=200, content={}, events=stream.end(answer))
        except Refused as refused:
            return _refusal(refused, refusing, dialect)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # say, of a chat template: its text goes to the client; SystemExit too
            traceback.print_exception(error)  # the traceback is for whoever runs this
            content = dialect.refusal(one_line(error), "failed", 500)
            return _Reply(status=500, content=content, events=dialect.broken(content))


_NOBODY = "no running episode has this URL; send requests to an episode's base_url + '/chat/completions'"


def _unheard(piece: Piece) -> None:
    """Of an answer that is sent whole."""


def _sender(written: Callable[[Piece], bytes], sending: Callable[[bytes], None]) -> OnPiece:
    def send(piece: Piece) -> None:
        if events := written(piece):
            sending(events)

    return send


def _refusal(refused: Refused, refusing: Refusing | None, dialect: Dialect) -> _Reply:
    if refusing is not None:
        refusing(refused.message)
    content = dialect.refusal(refused.message, refused.code, refused.status)
    return _Reply(status=refused.status, content=content, events=dialect.broken(content))


def _app(server: ChatServer) -> Starlette:
    """The paths of the server."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    def response(reply: _Reply) -> Response:
        if reply.status == 200 and reply.events:
            return Response(reply.events, media_type="text/event-stream")
        return Response(json.dumps(reply.content), reply.status, media_type="application/json")

    async def post(dialect: Dialect, request: Request) -> Response:
        parts: asyncio.Queue[bytes] = asyncio.Queue()
        name, body = request.path_params["name"], await request.body()
        answering = asyncio.create_task(server.reply(name, body, dialect, parts.put_nowait))
        gone = asyncio.create_task(closed(request))
        streamed = False
        try:
            if part := await _next(parts, answering, gone):
                streamed = True
                return StreamingResponse(following(part, parts, answering, gone), media_type="text/event-stream")
            return response(answering.result()) if answering.done() else Response(status_code=CLOSED)
        finally:
            if not streamed:
                answering.cancel()
                gone.cancel()

    async def following(
        part: bytes, parts: asyncio.Queue[bytes], answering: asyncio.Task[_Reply], gone: asyncio.Task[None]
    ) -> AsyncIterator[bytes]:
        """The events of a stream from this part on, until the client has gone."""
        try:
            yield part
            while part := await _next(parts, answering, gone):
                yield part
            if answering.done():
                yield answering.result().events
        finally:
            answering.cancel()
            gone.cancel()

    async def closed(request: Request) -> None:
        """Return once the client has closed the connection of a request that was received."""
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def models(request: Request) -> Response:
        return response(server.models(request.path_params["name"]))

    async def reward(request: Request) -> Response:
        return response(server.reward(request.path_params["name"], await request.body()))

    async def lost(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return response(server.lost(request.method, request.url.path, error.status_code))

    def route(dialect: Dialect) -> Route:
        async def endpoint(request: Request) -> Response:
            return await post(dialect, request)

        return Route(f"/{{name}}/v1/{dialect.path}", endpoint, methods=["POST"])

    return Starlette(
        routes=[
            *map(route, DIALECTS),
            Route(f"/{{name}}/v1/{REWARD}", reward, methods=["POST"]),
            Route("/{name}/v1/models", models, methods=["GET"]),
        ],
        exception_handlers={404: lost, 405: lost},
    )


async def _next(parts: asyncio.Queue[bytes], answering: asyncio.Task[_Reply], gone: asyncio.Task[None]) -> bytes:
    """The next part of a stream; b"" if its end has come, or its client has gone."""
    part = asyncio.ensure_future(parts.get())
    try:
        await asyncio.wait([part, answering, gone], return_when=asyncio.FIRST_COMPLETED)
        return part.result() if part.done() else b""
    finally:
        part.cancel()


def _name(base_url: str) -> str:
    return base_url.split("/")[3]  # http://host:port/name/v1
