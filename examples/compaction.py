"""Episodes whose conversation outgrows the context: five digits arrive in parts, and at the end the policy says them.

When a part no longer fits into the conversation, the policy is asked for a summary, and the episode goes on in a new
conversation, which begins with the summary: what that leaves out is gone. `examples/compaction.toml` runs this, and
docs/agents.md compares it with leaving out the oldest messages.
"""

from __future__ import annotations

from typing import Literal

from corerl.algorithms import compared, group_advantages
from corerl.rollout import position_match
from corerl.types import FloatArray, IntArray, SampleBatch
from corerl_agents import Episode

BUDGET = 7  # characters of a conversation besides the last question, each a token
SUM_UP, ANSWER = "s", "!"  # what the policy is asked for


async def remember(episode: Episode, *, memory: Literal["summary", "newest"] = "summary") -> float:
    """One episode. Half of the prompts begin as if four digits had been summed up before: whether the policy reads a
    summary matters even while it writes none that is worth reading."""
    digits = episode.prompt.answer
    parts = [digits[:4], digits[4:]] if episode.prompt.index % 2 else [digits[:3], digits[3:4], digits[4:]]
    conversation: list[str] = []
    for part in parts:
        message = f"{part}>"
        room = BUDGET - len(message)
        if memory == "summary" and _length(conversation) > room:
            summary = await _said(episode, [*conversation, SUM_UP])
            conversation = [f"{summary[: room - 1]}>"]
        while _length(conversation) > room:
            conversation = conversation[1:]
        conversation.append(message)
    return position_match(episode.prompt, await _said(episode, [*conversation, ANSWER]))


def _length(conversation: list[str]) -> int:
    return sum(map(len, conversation))


async def _said(episode: Episode, conversation: list[str]) -> str:
    """The policy's answer to a conversation that it reads from its beginning."""
    choice = await episode.chat_async([{"role": "user", "content": text} for text in conversation])
    return str(choice["message"]["content"])


def without_summaries(samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> FloatArray:
    """[N] the advantages of `grpo`, but 0 for the tokens of summaries: of the rows that do not end with their episode's
    answer, these are all that is trained on. For a comparison: `algorithm.advantages` names this function."""

    def normalized(rewards: FloatArray, groups: IntArray) -> FloatArray:
        return group_advantages(rewards, groups, normalize_std=True)

    advantages = compared(rewards, samples, normalized) * samples.row_columns["final"]
    return advantages[samples.row_of]
