"""HTTP for a `Service`: routes, key, host, sizes, and bodies of errors; served in a thread of its own, while the thread
that runs the server drives the group."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import ipaddress
import json
import socket
import traceback
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from tinker import types as sdk
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest

from corerl.messages import one_line, shorten
from corerl.rollout import EventLoop
from corerl_tinker import wire
from corerl_tinker.options import ServeOptions
from corerl_tinker.requests import Refused, read
from corerl_tinker.service import Service
from corerl_tinker.sessions import Failure

if TYPE_CHECKING:
    from corerl_tinker.training import ServedPolicy

MOST_JSON = 16 * 2**20  # bytes of a body in JSON, which is read in the thread that serves
FAILED = 422  # for what no client sends, and faults of the server; not 5xx, which is repeated for minutes in silence
CLOSED = 499  # for a client that has gone, which nobody reads
IDLE_SECONDS = 24 * 3600  # a server that closes a connection earlier may do so as a client sends its next request
# What clients are told before anything else; other flags are as the SDK has them. Without this one each sample has a
# connection of its own, which it waits in.
CLIENT_CONFIG = {"sample_use_retrieve_futures": True}
RUN, CHECKPOINT = "training_runs/{run}", "training_runs/{run}/checkpoints/{checkpoint:path}"
JSON = "application/json"
ANYTHING = TypeAdapter(Any)  # the SDK's own classes too
Handler = Callable[..., Any]  # takes the body as its route says, and words of the path; see `Service`


def routes(service: Service) -> list[tuple[str, str, Handler, Any]]:
    """Method, path, handler, and what the handler is given of the body: a request of this class, the JSON object as a
    `dict`, the `bytes`, or None for nothing."""
    in_turn = partial(partial, service.in_turn)
    return [
        ("GET", "healthz", _always({"status": "ok"}), None),
        ("GET", "get_server_capabilities", service.capabilities, None),
        ("POST", "client/config", _always(CLIENT_CONFIG), None),
        # Stack traces, and headers of failed requests, which are not kept.
        ("POST", "telemetry", _always({"status": "accepted"}), None),
        ("POST", "create_session", service.create_session, sdk.CreateSessionRequest),
        ("POST", "session_heartbeat", service.session_heartbeat, sdk.SessionHeartbeatRequest),
        ("POST", "sessions/{session}/finish", service.finish_session, None),
        ("POST", "create_model", service.create_model, sdk.CreateModelRequest),
        ("POST", "get_info", service.get_info, sdk.GetInfoRequest),
        ("POST", "forward_backward", service.forward_backward, bytes),
        ("POST", "optim_step", in_turn(sdk.OptimStepRequest, service.optim_step), dict),
        ("POST", "save_weights", in_turn(sdk.SaveWeightsRequest, service.save_weights), dict),
        ("POST", "load_weights", service.create_or_load, dict),
        ("POST", "save_weights_for_sampler", in_turn(sdk.SaveWeightsForSamplerRequest, service.save_for_sampler), dict),
        ("POST", "create_sampling_session", service.create_sampling_session, sdk.CreateSamplingSessionRequest),
        ("GET", "samplers/{sampler}", service.get_sampler, None),
        ("POST", "asample", service.asample, dict),
        ("POST", "retrieve_future", service.retrieve_future, sdk.FutureRetrieveRequest),
        ("POST", "retrieve_futures", service.retrieve_futures, FuturesRetrieveRequest),
        ("GET", RUN, service.training_run, None),
        ("GET", f"{RUN}/checkpoints", service.checkpoints, None),
        ("POST", "weights_info", service.weights_info, dict),
        ("PUT", f"{CHECKPOINT}/ttl", service.expire_checkpoint, dict),
        ("DELETE", CHECKPOINT, service.delete_checkpoint, None),
    ]


def _always(fields: Any) -> Handler:
    async def handler() -> Any:  # in no thread, for which it would wait while passes are read in all of them
        return fields

    return handler


def app(service: Service, *, key: str, hosts: Collection[str] = ()) -> Starlette:
    """Answers to whoever has the key, under the names `hosts`, localhost or an IP address."""
    names = {"localhost", *(host.lower() for host in hosts)}

    def route(method: str, path: str, handler: Handler, given: Any) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                _require_entry(request, key=key, hosts=names)
                body = await _body(request, most=wire.MOST_BYTES if given is bytes else MOST_JSON)
                call = partial(handler, *_given(body, given), **request.path_params)
                found = await (call() if inspect.iscoroutinefunction(handler) else asyncio.to_thread(call))
                if found is None:
                    return Response(status_code=204)
                return found if isinstance(found, Response) else Response(ANYTHING.dump_json(found), media_type=JSON)
            except Refused as refused:
                return Failure(refused.message, status=refused.status)
            except ClientDisconnect:
                return Response(status_code=CLOSED)
            except Exception as error:
                traceback.print_exception(error)
                return Failure(f"the server cannot answer this: {one_line(error)}", status=FAILED)

        return Route(f"/api/v1/{path}", endpoint, methods=[method])

    async def lost(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shorten(request.url.path, 200)
        return Failure(f"{request.method} {path} is not served here", status=error.status_code)

    return Starlette(
        routes=[route(*each) for each in routes(service)],
        exception_handlers={404: lost, 405: lost},
    )


def _require_entry(request: Request, *, key: str, hosts: Collection[str]) -> None:
    # A web page whose name is made to lead here has that name as host: no such name is an IP address.
    # Starlette's `request.url` has the server's own name where it does not like the header.
    if not _is_known(host := request.headers.get("host", ""), hosts):
        raise Refused(f"this server is not called {shorten(host, 200)!r}; list its names in serve.hosts", status=403)
    given = request.headers.get("x-api-key", "").encode("latin-1")
    if not hmac.compare_digest(given, key.encode()):
        raise Refused("the key is not the one that this server printed; set TINKER_API_KEY to it", status=401)


def _is_known(host: str, names: Collection[str]) -> bool:
    """Whether the name in this header, with or without a port, is one of these or an IP address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


async def _body(request: Request, *, most: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise Refused(f"the body has more than {most} bytes; send less at once", status=413)
    return bytes(body)


def _given(body: bytes, wanted: Any) -> tuple[Any, ...]:
    if wanted is None:
        return ()
    if wanted is bytes:
        return (body,)
    fields = json.loads(body)
    return (fields if wanted is dict else read(wanted, fields),)


class Server:
    def __init__(
        self,
        policy: ServedPolicy,
        options: ServeOptions,
        *,
        key: str,
        listening: socket.socket,
        notify: Callable[[str], None],
    ) -> None:
        self._loop, self._socket = EventLoop("server"), listening
        self.service = Service(policy, options, self._loop, notify=notify)
        self.http = uvicorn.Server(
            uvicorn.Config(
                app(self.service, key=key, hosts=options.hosts),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="critical",  # `notify` says what matters
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
            )
        )

    def run(self) -> None:
        """Serve until `http` is told to exit, or this thread is interrupted."""
        try:
            self._loop.run(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self.service.work())
            await self.http.serve(sockets=[self._socket])
            working.cancel()
