"""Calls of tools, read out of what the policy says: how each family of models writes them, as data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class CallFormat:
    """Calls end an answer, one behind the other, each a JSON object with a name and arguments."""

    taught: re.Pattern[str]  # in chat templates whose models write calls so
    opening: str  # before the first of them; "": an answer is either text or calls
    between: re.Pattern[str]
    closing: str  # behind the last
    arguments: str  # what the object calls them

    def read(self, text: str) -> tuple[str, list[dict[str, str]]] | None:
        """The text before the calls, and these, each a name and its arguments as JSON. None where there are none, and
        where one of them is malformed."""
        before, _, calls = text.partition(self.opening) if self.opening else ("", "", text)
        calls = calls.strip()
        if not calls.endswith(self.closing):
            return None
        try:
            read = [self._call(part) for part in self.between.split(calls.removesuffix(self.closing))]
        except (ValueError, RecursionError):  # a policy may say a thousand brackets
            return None
        return before.strip(), read

    def _call(self, text: str) -> dict[str, str]:
        """Raises ValueError where it is none."""
        call = json.loads(text)
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
    """What `rollout.episodes.tool_calls` says; `auto` is the format that the chat template teaches, if any."""
    if name == "auto":
        return next((each for each in FORMATS.values() if each.taught.search(str(chat_template))), None)
    return None if name == "none" else FORMATS[name]


def as_told(calls: Sequence[Mapping[str, str]], *, number: int) -> list[dict[str, Any]]:
    """The calls in the shape of OpenAI's `message.tool_calls`, of message `number` of a conversation."""
    return [
        {
            # The same in every run of the same draws, since templates may write it; nine letters and digits, since some
            # refuse another one.
            "id": f"call{number:03d}{index:02d}",
            "type": "function",
            "function": call,
        }
        for index, call in enumerate(calls)
    ]


def meant(calls: Any) -> Any:
    """What they say, however a client writes them anew; as they are, where they have not the shape."""
    try:
        functions = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        return [(id_, name, json.loads(told) if isinstance(told, str) else told) for id_, name, told in functions]
    except (KeyError, TypeError, ValueError, RecursionError):
        return calls
