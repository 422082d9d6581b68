"""The dialects that clients speak: each reads requests from JSON, and writes answers as JSON and as events."""

from __future__ import annotations

from corerl_agents.dialects.base import Dialect
from corerl_agents.dialects.chat import CHAT
from corerl_agents.dialects.messages import COUNT_TOKENS, MESSAGES
from corerl_agents.dialects.responses import RESPONSES
from corerl_agents.dialects.tokens import TOKENS

DIALECTS: tuple[Dialect, ...] = (CHAT, MESSAGES, COUNT_TOKENS, RESPONSES, TOKENS)
