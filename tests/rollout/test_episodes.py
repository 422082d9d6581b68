"""What a user's function may be, and what it is given."""

from __future__ import annotations

import pytest

from corerl.data.prompts import Prompt
from corerl.errors import ConfigError
from corerl.rollout.episodes import Episode, resolve_function


def test_the_function_is_found_and_tried_before_anything_starts() -> None:
    found = resolve_function("examples.two_turn_tool:fetch", {"tool": False})
    assert (found.name, found.options) == ("examples.two_turn_tool:fetch", {"tool": False})
    with pytest.raises(ConfigError, match="^rollout.function: 'examples.two_turn_tool:fetsh': .* did you mean"):
        resolve_function("examples.two_turn_tool:fetsh", {})
    with pytest.raises(ConfigError, match=r"^rollout.function=.* with rollout.episodes.options=\{'tol': 1\}: .*'tol'"):
        resolve_function("examples.two_turn_tool:fetch", {"tol": 1})


def test_an_episode_begins_with_the_prompts_own_messages() -> None:
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    episodes = [
        Episode(prompt=prompt, base_url="http://127.0.0.1:1/x/v1", client=None)  # type: ignore[arg-type]
        for prompt in (Prompt(index=40, text="21>", answer="12"), Prompt(index=1, text="s u", answer="", messages=chat))
    ]
    assert episodes[0].messages == [{"role": "user", "content": "21>"}]
    assert episodes[1].messages == list(chat) and episodes[1].messages is not episodes[1].messages
