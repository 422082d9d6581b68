"""Prompts that are chats: messages out of a row, or made of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from corerl.data.prompts import Prompt, PromptSource, Share

Messages = tuple[Mapping[str, Any], ...]


def read_messages(value: Sequence[Any]) -> Messages:
    """The messages of a row's field. Raises ValueError, naming the first that cannot be used."""
    messages = []
    for number, message in enumerate(value, start=1):
        # A column of structs has all fields of all messages: null where a message has none.
        known = {key: held for key, held in message.items() if held is not None} if isinstance(message, dict) else {}
        for key in ("role", "content"):
            if not isinstance(known.get(key), str):
                raise ValueError(f"message {number} has no text {key!r}; each wants a role and a content, both texts")
        messages.append(known)
    return tuple(messages)


def readable(messages: Messages) -> str:
    """One message as it is, several as lines `role: content`."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


class ChatPrompts(PromptSource):
    """The prompts of another source as chats: a text becomes a message of the user's, and keeps its `.text`. `system`
    begins every chat that has no system message of its own."""

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
