"""Episodes whose conversation outgrows the context: three drawers are opened in turn, and then the digits that lay in them
are to be said in order.

Each drawer is a call of a tool, as in `examples/two_turn_tool.py`. Before the third one the conversation is as long as it
may become: the policy is asked for a summary, and goes on in a new conversation that begins with it. What it does not
write there is gone. `examples/compaction.toml` runs it; docs/agents.md compares it with leaving out the oldest turns.
"""

from __future__ import annotations

from typing import Any, Literal

from corerl.rollout import position_match
from corerl_agents import Episode

CALLS = 0.2  # of the reward, for opening the right drawers
TURN = 5  # characters, each a token: what a drawer takes of the conversation, at most
SUMMARY = 5  # tokens of a summary at most, its end included

Messages = list[dict[str, Any]]


async def open_drawers(
    episode: Episode, *, budget: int = 14, memory: Literal["summary", "newest"] = "summary"
) -> dict[str, float]:
    """One episode. A conversation has at most `budget` characters before it is compacted: to the policy's summary, or to
    its newest messages."""
    digits = episode.prompt.answer
    drawers = [digits[:3], digits[3:4], digits[4:]]
    # Every other prompt begins as if its first drawers had been summed up before: what a summary is for is learned there.
    first = 2 * (episode.prompt.index % 2)
    messages: Messages = [{"role": "user", "content": f"{''.join(drawers[:first])}>"}]
    right = 0
    for number, content in enumerate(drawers[first:], start=first):
        if _length(messages) + TURN > budget:
            messages = await _summary(episode, messages) if memory == "summary" else _newest(messages, budget - TURN)
        messages.append({"role": "user", "content": f"{number}?"})
        call = (await episode.chat_async(messages, max_tokens=1))["message"]
        opened = call["content"] == str(number)
        messages += [call, {"role": "tool", "content": f"{content if opened else ''}>"}]
        right += opened
    messages.append({"role": "user", "content": "!"})
    said = (await episode.chat_async(messages))["message"]["content"]
    matched = (1 - CALLS) * position_match(episode.prompt, said)
    return {"calls": CALLS * right / (len(drawers) - first), "short" if first else "long": matched}


async def _summary(episode: Episode, messages: Messages) -> Messages:
    """The conversation that begins with the policy's summary of this one."""
    asked = [*messages, {"role": "user", "content": "s"}]
    summary = (await episode.chat_async(asked, max_tokens=SUMMARY))["message"]["content"]
    return [{"role": "user", "content": f"{summary}>"}]


def _newest(messages: Messages, most: int) -> Messages:
    """The conversation without its oldest turns, so that at most so many characters stay."""
    while _length(messages) > most or messages[0]["role"] != "user":
        messages = messages[1:]
    return messages


def _length(messages: Messages) -> int:
    return sum(len(message["content"]) for message in messages)
