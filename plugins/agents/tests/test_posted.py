"""Rewards that are posted to an episode's URL."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corerl.rollout import Judged
from corerl_agents.episodes import Episode
from corerl_agents.posted import NoReward, read_reward
from plugins.agents.tests.clients import post
from plugins.agents.tests.oracle import PROMPTS, Fails, Play


def asked(episode: Episode) -> None:
    episode.chat(episode.messages, max_tokens=2)


def test_a_posted_reward_is_the_episodes(play: Play) -> None:
    said: list[tuple[int, Any]] = []

    def posts(episode: Episode) -> None:
        asked(episode)
        body = {"reward": episode.prompt.index / 8, "parts": {"right": 1, "steps": 3.0}}
        said.extend([post(f"{episode.base_url}/reward", body), post(f"{episode.base_url}/reward", {"reward": 7.0})])

    rollout = play(posts, samples=1)
    assert rollout.outcomes == [Judged(reward=each, parts={"right": 1.0, "steps": 3.0}) for each in (5.0, 1.0)]
    assert sorted(status for status, _ in said) == [200, 200, 409, 409]
    refusals = sorted(answer["error"]["message"] for status, answer in said if status == 409)
    assert refusals == [f"the episode has a reward already, {each}; one is posted, once" for each in (1, 5)]


def test_a_posted_and_a_returned_reward_fail_the_episode(failure: Fails) -> None:
    def both(episode: Episode) -> float:
        asked(episode)
        assert post(f"{episode.base_url}/reward", {"reward": 1.0})[0] == 200
        return 2.0

    outcome = failure(both)
    assert outcome.kind == "no-number"
    assert "gave a reward, but another one, 1, was posted to the episode's URL on prompt 40" in outcome.message


def test_a_reward_behind_the_end_is_refused(play: Play) -> None:
    urls: list[str] = []

    def leaves(episode: Episode) -> float:
        asked(episode)
        urls.append(episode.base_url)
        return 1.0

    assert play(leaves, samples=1, prompts=PROMPTS[:1]).outcomes == [1.0]
    status, answer = post(f"{urls[0]}/reward", {"reward": 0.0})
    assert status == 404 and "a reward is posted before its episode ends" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"reward": NaN}', "reward: got nan, wanted a finite number"),
        ('{"reward": "1"}', "reward: got '1', wanted a finite number"),
        ("1.0", "got 1.0, wanted "),
        ('{"parts": {}}', "got {'parts': {}}, wanted "),
        ('{"reward": 1, "part": {}}', "got the field 'part', wanted "),
        ('{"reward": 1, "parts": [1]}', "parts: got [1], wanted finite numbers by name"),
        ('{"reward": 1, "parts": {"right": null}}', "parts.right: got None, wanted a finite number"),
    ],
)
def test_what_is_no_number_is_refused_with_a_sentence(body: str, text: str) -> None:
    with pytest.raises(NoReward) as error:
        read_reward(json.loads(body))
    assert str(error.value).startswith(text)
