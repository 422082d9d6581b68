"""HTTP for a `Service`: routes, key, host, sizes, and bodies of errors; what requests mean is none of its business."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from corerl.messages import one_line, shorten
from corerl_tinker import wire
from corerl_tinker.futures import Answer
from corerl_tinker.requests import Refused
from corerl_tinker.service import Service

MOST_JSON = 16 * 2**20  # bytes of a body in JSON, which is read in the thread that serves
SERVER_FAILED = 422  # not 5xx, which clients repeat for minutes without a word
CLOSED = 499  # for a client that has gone, which nobody reads
Handler = Callable[..., Awaitable[Answer | Mapping[str, Any] | None]]


def app(service: Service, *, key: str, hosts: Collection[str] = ()) -> Starlette:
    """Answers to whoever has the key, under the names `hosts`, localhost or an IP address."""
    names = {"localhost", *(host.lower() for host in hosts)}

    def route(methods: str, path: str, handler: Handler, *, is_json: bool = True) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                _require_entry(request, key=key, hosts=names)
                body = await _body(request, most=MOST_JSON if is_json else wire.MOST_BYTES)
                return _response(await handler(_object(body) if is_json else body, **request.path_params))
            except Refused as refused:
                return _refusal(refused.message, refused.status)
            except ClientDisconnect:
                return Response(status_code=CLOSED)
            except Exception as error:
                traceback.print_exception(error)
                return _refusal(f"the server has failed: {one_line(error)}", SERVER_FAILED)

        return Route(f"/api/v1/{path}", endpoint, methods=[methods])

    async def lost(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shorten(request.url.path, 200)
        return _refusal(f"{request.method} {path} is not served here", error.status_code)

    run, checkpoint = "training_runs/{run}", "training_runs/{run}/checkpoints/{checkpoint:path}"
    return Starlette(
        routes=[
            route("GET", "healthz", service.health),
            route("GET", "get_server_capabilities", service.capabilities),
            route("POST", "client/config", service.client_config),
            route("POST", "telemetry", service.telemetry),
            route("POST", "create_session", service.create_session),
            route("POST", "session_heartbeat", service.session_heartbeat),
            route("POST", "sessions/{session}/finish", service.finish_session),
            route("POST", "create_model", service.create_model),
            route("POST", "get_info", service.get_info),
            route("POST", "forward_backward", service.forward_backward, is_json=False),
            route("POST", "optim_step", service.optim_step),
            route("POST", "save_weights", service.save_weights),
            route("POST", "load_weights", service.load_weights),
            route("POST", "save_weights_for_sampler", service.save_weights_for_sampler),
            route("POST", "create_sampling_session", service.create_sampling_session),
            route("GET", "samplers/{sampler}", service.get_sampler),
            route("POST", "asample", service.asample),
            route("POST", "retrieve_future", service.retrieve_future),
            route("POST", "retrieve_futures", service.retrieve_futures),
            route("GET", "training_runs", service.training_runs),
            route("GET", run, service.training_run),
            route("GET", f"{run}/checkpoints", service.checkpoints),
            route("GET", "checkpoints", service.checkpoints),
            route("POST", "weights_info", service.weights_info),
            route("PUT", f"{checkpoint}/ttl", service.expire_checkpoint),
            route("DELETE", checkpoint, service.delete_checkpoint),
        ],
        exception_handlers={404: lost, 405: lost},
    )


def _require_entry(request: Request, *, key: str, hosts: Collection[str]) -> None:
    # A web page whose name is made to lead here has that name as host: no such name is an IP address.
    # Starlette's `request.url` has the server's own name where it does not like the header.
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:  # brackets without an address
        host = ""
    if host not in hosts and not _is_ip_address(host):
        raise Refused(f"this server is not called {shorten(host, 200)!r}; list its names in serve.hosts", status=403)
    given = request.headers.get("x-api-key", "").encode("latin-1")
    if not hmac.compare_digest(given, key.encode()):
        raise Refused("the key is not the one that this server printed; set TINKER_API_KEY to it", status=401)


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


async def _body(request: Request, *, most: int) -> bytes:
    """At most `most` bytes, also where they are compressed."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise Refused(f"the body has more than {most} bytes; send less at once", status=413)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        return await asyncio.to_thread(wire.decompressed, bytes(body), most=most)
    if encoding != "identity":
        raise Refused(f"the body is encoded as {shorten(encoding, 40)!r}; use zstd, or none", status=415)
    return bytes(body)


def _object(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; an empty one where there is none."""
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {one_line(error)}") from error
    if not isinstance(fields, dict):
        raise Refused(f"the body is a {type(fields).__name__} in JSON, wanted an object")
    return fields


def _response(found: Answer | Mapping[str, Any] | None) -> Response:
    if isinstance(found, Answer):
        return Response(found.body, media_type=found.media_type)
    return Response(status_code=204) if found is None else JSONResponse(found)


def _refusal(sentence: str, status: int) -> Response:
    return JSONResponse({"error": sentence, "category": "user"}, status)
