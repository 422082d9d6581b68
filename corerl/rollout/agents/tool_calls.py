"""Parse tool calls out of the policy's answers; the format of each model family is data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from corerl.plain_json import parse_json


@frozen(kw_only=True)
class CallFormat:
    """How a model family writes tool calls at the end of an answer; each is a JSON object with a name and arguments."""

    taught: re.Pattern[str]  # matches the chat templates of models that use this format
    opening: str  # before the first call; "": an answer is either text or calls
    between: re.Pattern[str]
    closing: str  # after the last call
    arguments: str  # the key of the arguments

    def read(self, text: str) -> tuple[str, list[dict[str, str]]] | None:
        """The text before the calls, and the calls: names, and arguments as JSON. None if there are none or any is
        bad."""
        before, _, calls = text.partition(self.opening) if self.opening else ("", "", text)
        calls = calls.strip()
        if not calls.endswith(self.closing):
            return None
        try:
            read = [self._call(part) for part in self.between.split(calls.removesuffix(self.closing))]
        except (ValueError, RecursionError):  # nested more deeply than can be written again
            return None
        return before.strip(), read

    def _call(self, text: str) -> dict[str, str]:
        """Parse one call. Raises ValueError if it is malformed."""
        call = parse_json(text)
        name, arguments = (call.get("name"), call.get(self.arguments)) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("a call has a name and arguments")
        return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}


FORMATS: Mapping[str, CallFormat] = {
    # Hermes 2 Pro and 3, Qwen 2.5 and 3. Qwen3-Coder has the same tags with XML between them, which is not read.
    "hermes": CallFormat(
        taught=re.compile(r'<tool_call>(\\n|\s)*\{\\?"name'),
        opening="<tool_call>",
        between=re.compile(r"</tool_call>\s*<tool_call>"),
        closing="</tool_call>",
        arguments="arguments",
    ),
    # Llama 3.1 to 3.3.
    "llama-json": CallFormat(
        taught=re.compile(r'"parameters\\?": dictionary of argument name'),
        opening="",
        between=re.compile(r"(?<=\})\s*;\s*(?=\{)"),
        closing="",
        arguments="parameters",
    ),
}


def format_of(name: str, chat_template: Any) -> CallFormat | None:
    """The format `rollout.episodes.tool_calls` names; `auto`: the one that the chat template teaches, if any."""
    if name == "auto":
        return next((each for each in FORMATS.values() if each.taught.search(str(chat_template))), None)
    return None if name == "none" else FORMATS[name]


def as_told(calls: Sequence[Mapping[str, str]], *, number: int) -> list[dict[str, Any]]:
    """Format the calls of message `number` of a conversation as OpenAI's `message.tool_calls`."""
    return [
        {
            # Deterministic, since templates may print it; nine letters and digits, since some templates require that.
            "id": f"call{number:03d}{index:02d}",
            "type": "function",
            "function": call,
        }
        for index, call in enumerate(calls)
    ]


def meant(calls: Any) -> Any:
    """The calls in a form that compares equal however a client rewrites them; unchanged if they have another shape."""
    try:
        functions = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        return [(id_, name, parse_json(told) if isinstance(told, str) else told) for id_, name, told in functions]
    except (KeyError, TypeError, ValueError, RecursionError):
        return calls
