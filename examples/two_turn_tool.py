"""Episodes of two turns: the policy opens one of ten drawers, and then says what lies in it.

It is told which drawer, and nothing of the five digits that lie there. Its first turn is one token, the drawer that it
opens; a tool answers with what it holds; its second turn repeats the digits. `examples/two_turn_tool.toml` runs it.
"""

from __future__ import annotations

import random

from corerl.rollout import position_match
from corerl_agents import Episode

CALL = 0.2  # of the reward, for opening the right drawer


def fetch(episode: Episode, *, tool: bool = True) -> float:
    """One episode. Without the tool all drawers are empty, and the second turn can only guess."""
    drawer = str(random.Random(episode.prompt.index).randrange(10))
    messages = [{"role": "user", "content": f"{drawer}?"}]
    call = episode.chat(messages, max_tokens=1)["message"]
    right = call["content"] == drawer
    found = episode.prompt.answer if right and tool else ""
    messages += [call, {"role": "tool", "content": f"{found}>"}]
    said = episode.chat(messages)["message"]["content"]
    return CALL * right + (1 - CALL) * position_match(episode.prompt, said)
