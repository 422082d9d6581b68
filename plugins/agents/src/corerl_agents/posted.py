"""Rewards that come as JSON: posted to an episode's URL, or in the last line of a command's output."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from corerl.data import parse_json
from corerl.messages import short_repr
from corerl.rollout import Judged, number
from corerl_agents.refused import SHOWN, Refused

FORM = '{"reward": 1.0}, with {"parts": {"NAME": 0.5}} for what is reported besides'


class NoReward(ValueError):
    """What came is no reward; the text says what it is, and what was wanted."""


def read_reward(content: Any) -> Judged:
    """The reward in `{"reward": 1.0, "parts": {"right": 1.0}}`; parts are reported, and count nothing. Raises
    NoReward."""
    if not isinstance(content, Mapping) or "reward" not in content:
        raise NoReward(f"got {short_repr(content, SHOWN)}, wanted {FORM}")
    if unknown := content.keys() - {"reward", "parts"}:
        raise NoReward(f"got the field {min(unknown)!r}, wanted {FORM}")
    if (reward := number(content["reward"])) is None:
        raise NoReward(f"reward: got {short_repr(content['reward'], SHOWN)}, wanted a finite number")
    given = content.get("parts", {})
    if not isinstance(given, Mapping):
        raise NoReward(f"parts: got {short_repr(given, SHOWN)}, wanted finite numbers by name")
    parts: dict[str, float] = {}
    for name, each in given.items():
        if (part := number(each)) is None:
            raise NoReward(f"parts.{name}: got {short_repr(each, SHOWN)}, wanted a finite number")
        parts[name] = part
    return Judged(reward=reward, parts=parts)


def read_rewards(content: Mapping[str, Any], roles: Collection[str]) -> dict[str, Judged]:
    """Those of several roles, in `{"reward": {"white": 1.0, "black": {"reward": -1.0, "parts": {"moves": 9}}}}`. Raises
    NoReward."""
    given = content["reward"]
    if not isinstance(given, Mapping) or len(content) > 1 or given.keys() - set(roles):
        form = json.dumps({"reward": dict.fromkeys(roles, 1.0)})
        raise NoReward(f"got {short_repr(content, SHOWN)}, wanted a reward for each role, as in {form}")
    each = {name: one if isinstance(one, Mapping) else {"reward": one} for name, one in given.items()}
    return {name: read_reward(one) for name, one in each.items()}


class PostedReward:
    """The reward of one episode that somebody else than its function knows."""

    def __init__(self) -> None:
        self.judged: Judged | None = None  # once it has been posted

    def post(self, body: str | bytes) -> None:
        """Take the reward, once. Raises Refused."""
        try:
            judged = read_reward(parse_json(body))
        except NoReward as error:
            raise Refused(str(error), code="no_reward") from error
        except ValueError as error:
            raise Refused(f"the body is no JSON ({error}); send {FORM}", code="no_reward") from error
        if self.judged is not None:
            raise Refused(
                f"the episode has a reward already, {self.judged.reward:g}; one is posted, once",
                status=409,
                code="rewarded",
            )
        self.judged = judged
