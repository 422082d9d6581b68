"""Test a rollout function without a run: a policy that gives scripted answers, over HTTP as in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import field, frozen

from corerl.data.prompts import Prompt
from corerl.rollout.conversation import Answer, Conversation, Refused, continued
from corerl.rollout.episodes import Episode
from corerl.rollout.front import ChatAnswer, ChatRequest, Front
from corerl.rollout.tool_calls import as_told, format_of


@frozen(kw_only=True)
class Scripted:
    """An episode to pass to a rollout function, and the requests that the function made."""

    episode: Episode
    requests: list[ChatRequest] = field(factory=list)

    @property
    def asked(self) -> list[list[str]]:
        """The message texts of each request."""
        return [[str(message.get("content") or "") for message in request.messages] for request in self.requests]


@contextmanager
def scripted(prompt: Prompt, answers: Sequence[str], *, tool_calls: str = "hermes") -> Iterator[Scripted]:
    """Give `answers` one after the other; as in a run, refuse a request that does not continue the conversation.

    An answer ends before a request's stop text. If a request has tools, tool calls are parsed as
    `rollout.episodes.tool_calls` says.
    """
    front = Front(temperature=1.0, top_p=1.0)
    left = iter(answers)
    calling = format_of(tool_calls, "")
    conversation = Conversation()

    def answer(request: ChatRequest) -> ChatAnswer:
        nonlocal conversation
        messages = continued(conversation, request.messages, request.tools)
        script.requests.append(request)
        text = next(left, None)
        if text is None:
            raise Refused(f"the script has only {len(answers)} answers, but one more was requested")
        for stop in request.stop:
            text = text.partition(stop)[0]
        read = calling.read(text) if calling is not None and request.tools else None
        content, calls = read if read is not None else (text, [])
        said = Answer(text=text, content=content, calls=tuple(as_told(calls, number=len(messages))))
        conversation = Conversation(
            messages=(*messages, said.message),
            answers=conversation.answers | {len(messages)},
            tools=tuple(request.tools),
        )
        return ChatAnswer(
            text=content,
            tool_calls=said.calls,
            finish_reason="tool_calls" if calls else "stop",
            prompt_tokens=0,
            tokens=(),
            logprobs=(),
        )

    script = Scripted(episode=Episode(prompt=prompt, base_url=front.open(answer), client=front.client))
    try:
        yield script
    finally:
        front.close()
