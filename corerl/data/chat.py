"""Chat prompts: messages read from a row, or made from a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from corerl.data.prompts import Prompt, PromptSource, Share

Messages = tuple[Mapping[str, Any], ...]


def read_messages(value: Sequence[Any]) -> Messages:
    """The messages in a row's field. Raises ValueError naming the first one that cannot be used."""
    messages = []
    for number, message in enumerate(value, start=1):
        # A column of structs has the fields of all messages, null in messages that lack them.
        known = {key: held for key, held in message.items() if held is not None} if isinstance(message, dict) else {}
        for key in ("role", "content"):
            if not isinstance(known.get(key), str):
                raise ValueError(
                    f"message {number} has no string {key!r}; every message needs a role and a content, both strings"
                )
        messages.append(known)
    return tuple(messages)


def readable(messages: Messages) -> str:
    """The content of a single message; several messages as lines `role: content`."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


class ChatPrompts(PromptSource):
    """Another source's prompts as chats: a text becomes a user message and stays in `.text`. `system` begins every chat
    that does not begin with a system message."""

    chat = True

    def __init__(self, source: PromptSource, *, system: str) -> None:
        self._source = source
        self._system: Messages = ({"role": "system", "content": system},) if system else ()
        self.train, self.held_out = source.train, source.held_out

    @property
    def shares(self) -> tuple[Share, ...]:
        return self._source.shares

    def prompt(self, index: int) -> Prompt:
        prompt = self._source.prompt(index)
        messages: Messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        if messages[0]["role"] != "system":
            messages = self._system + messages
        return evolve(prompt, messages=messages)
