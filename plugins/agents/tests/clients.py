"""Clients of an episode's URL: the official ones, and plain HTTP."""

from __future__ import annotations

import http.client
import json
import platform
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.later import Later
from tests.machine import paced

openai: Any = Later("openai")

platform.platform()  # official clients ask for it; the first answer comes from a process, which tests must not start


def of_openai(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=paced(20))


def of_anthropic(url: str) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="wants anthropic")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=paced(20))


def connected(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=paced(20))


def sent(connection: http.client.HTTPConnection, url: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    """Status of the answer, and what its JSON says."""
    connection.request(method, urlsplit(url).path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def post(url: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    connection = connected(url)
    found = sent(connection, url, body, method)
    connection.close()
    return found
