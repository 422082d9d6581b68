"""An OpenAI-compatible server in the driver: serves chat requests, with one base URL per conversation."""

from __future__ import annotations

import http.client
import itertools
import json
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import frozen

from corerl.event_loop import EventLoop
from corerl.plain_json import parse_json
from corerl.rollout.agents.conversation import Message, Refused

MODEL = "policy"  # the model's name in answers; requests may use any name
API_KEY = "none"  # clients require one; what protects an episode is its unguessable path
CLOSING = 0.1  # seconds between checks whether the server was closed
PATH = "/chat/completions"


@frozen(kw_only=True)
class ChatRequest:
    """The parameters of a chat request that may differ from one request to the next."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None  # None: as many as the episode has left
    stop: Sequence[str] = ()
    logprobs: bool = False


@frozen(kw_only=True)
class ChatAnswer:
    """The answer to a `ChatRequest`."""

    text: str
    tool_calls: Sequence[Mapping[str, Any]] = ()  # in OpenAI's shape
    finish_reason: str  # stop, tool_calls or length
    prompt_tokens: int  # tokens before the answer
    tokens: Sequence[str]  # [m] as texts
    logprobs: Sequence[float]  # [m]


Answering = Callable[[ChatRequest], Coroutine[Any, Any, ChatAnswer]]  # runs in the server's loop; raises Refused
Refusing = Callable[[str], None]  # called with the message of each refused request


class ChatServer:
    """The server. Listens on localhost only, from construction until `close`."""

    def __init__(self, loop: EventLoop, *, temperature: float, top_p: float, top_k: int = 0) -> None:
        """Requests may repeat these values and are refused any others."""
        self._loop = loop
        self._sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._open: dict[str, tuple[Answering, Refusing]] = {}
        self._numbers = itertools.count()  # numbers the answers
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.front = self
        self.client = Client("127.0.0.1", self._server.server_port)
        threading.Thread(target=self._server.serve_forever, args=(CLOSING,), name="rollout front", daemon=True).start()

    def open(self, answering: Answering, refusing: Refusing = lambda message: None) -> str:
        """Return a new base URL; `answering` handles its requests until `shut`."""
        name = secrets.token_hex(16)
        self._open[name] = answering, refusing
        return f"http://127.0.0.1:{self._server.server_port}/{name}/v1"

    def shut(self, base_url: str) -> None:
        """Refuse all further requests to this base URL."""
        del self._open[_name(base_url.partition("//")[2].partition("/")[2])]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.client.close()

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Handle one POST request; returns the HTTP status and the JSON content."""
        answering, refusing = self._open.get(_name(path), (None, None))
        try:
            if answering is None or not path.endswith(PATH):
                raise Refused(
                    f"{path}: no running episode has this URL; send requests to an episode's base_url + {PATH!r}",
                    status=404,
                    code="not_found",
                )
            request = self._read(body)
            return 200, _completion(
                self._loop.begin(answering(request)).result(), number=next(self._numbers), told=request.logprobs
            )
        except Refused as refused:
            if refusing is not None:
                refusing(refused.message)
            kind = "invalid_request_error"
            return refused.status, {
                "error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}
            }
        except Exception as error:  # say, of a chat template: its text goes to the client
            traceback.print_exc()  # the traceback is for whoever runs this
            said = f"{type(error).__name__}: {error}"
            return 500, {"error": {"message": said, "type": "server_error", "param": None, "code": "failed"}}

    def _read(self, body: bytes) -> ChatRequest:
        try:
            asked = parse_json(body)
        except ValueError as error:
            raise Refused(f"the request is not valid JSON: {error}") from error
        if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
            raise Refused("messages: missing or not a list; send a list of messages")
        asked = {name: value for name, value in asked.items() if value is not None and value != []}
        limits = [asked.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in asked]
        if any(not isinstance(limit, int) or limit < 1 for limit in limits):
            raise Refused(f"max_tokens: got {limits}, wanted a whole number of at least 1")
        stop = asked.pop("stop", [])
        request = ChatRequest(
            messages=asked.pop("messages", []),
            tools=_list_of(dict, "tools", asked.pop("tools", [])),
            max_tokens=min(limits, default=None),
            stop=_list_of(str, "stop", [stop] if isinstance(stop, str) else stop),
            logprobs=bool(asked.pop("logprobs", False)),
        )
        self._require_harmless(asked)
        return request

    def _require_harmless(self, rest: Mapping[str, Any]) -> None:
        """Raise Refused for a parameter that would change what is sampled or how it is sent, instead of ignoring it."""
        same: dict[str, Any] = {"stream": False, "n": 1, "top_logprobs": 0, **self._sampling}
        same |= {"tool_choice": "auto", "parallel_tool_calls": True}
        for name, value in rest.items():
            if name in self._sampling and value != same[name]:
                raise Refused(
                    f"{name}: got {value!r}, but this run samples with rollout.{name}={same[name]!r}, as its loss "
                    "assumes; leave it out",
                    code="unsupported_parameter",
                )
            if name not in ("model", "user", "metadata") and value != same.get(name, 0):
                wanted = f"wanted {same[name]!r}" if name in same else "which is not supported"
                raise Refused(f"{name}: got {value!r}, {wanted}; leave it out", code="unsupported_parameter")


def _list_of(kind: type, name: str, value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise Refused(f"{name}: got {value!r}, wanted a list of {'strings' if kind is str else 'objects'}")
    return value


def _name(path: str) -> str:
    return path.removeprefix("/").partition("/")[0]


def _completion(answer: ChatAnswer, *, number: int, told: bool) -> dict[str, Any]:
    """Format the answer as OpenAI's `chat.completion`."""
    logprobs = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]
    said = len(answer.tokens)
    calls = {"tool_calls": list(answer.tool_calls)} if answer.tool_calls else {}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text or (None if calls else ""), **calls},
                "finish_reason": answer.finish_reason,
                "logprobs": {"content": logprobs} if told else None,
            }
        ],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": said,
            "total_tokens": answer.prompt_tokens + said,
        },
    }


class Client:
    """Posts JSON from any thread, reusing idle connections."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: deque[http.client.HTTPConnection] = deque()  # a new connection costs more than a request

    def post(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = http.client.HTTPConnection(self._host, self._port)
        try:
            connection.request("POST", path, json.dumps(content).encode())
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # many episodes may start and connect at the same moment
    front: ChatServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client has gone, say after its episode timed out
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive
    disable_nagle_algorithm = True
    server: _Server

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, content = self.server.front.answer(self.path, asked)
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  -- the base class's name for it
        """Log nothing: the run reports what matters itself."""
