"""What a user's function may be, and what it is given."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from corerl.data import Prompt
from corerl.rollout import Failure, Judged
from corerl_agents.episodes import Episode, EpisodeFunction
from tests.machine import paced


async def impatient(episode: Episode) -> float:
    raise TimeoutError("the tool did not answer")


@pytest.mark.parametrize(
    ("function", "kind", "told"),
    [
        (lambda episode: 10**5000, "no-number", "returned a value that raised ValueError: "),
        (lambda episode: "x" * 10**6, "no-number", f"returned '{116 * 'x'}..., wanted a finite number, numbers"),
        (lambda episode: {"right": None}, "no-number", "returned {'right': None}, wanted a finite number, numbers"),
        (lambda episode: [1.0, math.inf], "no-number", "returned [1.0, inf], wanted a finite number, numbers by"),
        (lambda episode: [[1.0]], "no-number", "returned [[1.0]], wanted a finite number, numbers by name, one for "),
        (lambda episode: [], "no-number", "returned [], wanted a finite number, numbers by name, one for each"),
        (lambda episode: torch.zeros((), device="meta"), "no-number", "returned a value that raised RuntimeError: "),
        (lambda episode: math.nan, "no-number", "returned nan, wanted a finite number, numbers by name, one for "),
        (impatient, "raised", "raised TimeoutError: the tool did not answer (plugins/agents/tests/test_episodes.py:"),
    ],
)
def test_what_is_no_reward_fails_the_episode(function: Callable[[Episode], Any], kind: str, told: str) -> None:
    episode = Episode(prompt=Prompt(index=0, text="q", answer=""), base_url="", server=None)  # type: ignore[arg-type]
    failure = asyncio.run(EpisodeFunction(name="mine:play", function=function).play(episode))
    assert isinstance(failure, Failure) and failure.kind == kind
    assert failure.message.startswith(f"samplers.episodes.function 'mine:play' {told}")


def test_an_episode_returns_parts_or_rewards_of_turns() -> None:
    episode = Episode(prompt=Prompt(index=0, text="q", answer=""), base_url="", server=None)  # type: ignore[arg-type]

    def returned(value: object) -> object:
        return asyncio.run(EpisodeFunction(name="mine:play", function=lambda episode: value).play(episode))

    assert returned({"right": 1, "short": -0.5}) == Judged(reward=0.5, parts={"right": 1.0, "short": -0.5})
    for value in ([1, 0.5], (1.0, 0.5), np.array([1.0, 0.5]), torch.tensor([1.0, 0.5])):
        assert returned(value) == Judged(reward=1.5, turns=(1.0, 0.5))
    third = float(np.float32(0.1))  # as the column of the batch has it, so that the sums are equal
    assert returned([0.1, 0.1]) == Judged(reward=2 * third, turns=(third, third))


def test_what_a_function_makes_of_its_messages_stays_its_own() -> None:
    chat = ({"role": "user", "content": [{"type": "text", "text": "q"}]},)
    prompt = Prompt(index=0, text="q", answer="", messages=chat)
    episode = Episode(prompt=prompt, base_url="", server=None)  # type: ignore[arg-type]
    episode.messages[0]["content"].append({"type": "image"})
    assert episode.messages == [{"role": "user", "content": [{"type": "text", "text": "q"}]}]


def test_an_async_function_that_exits_fails_its_episode_alone() -> None:
    ended, loops = asyncio.Event(), set()

    async def exits() -> None:
        sys.exit("bad argument")

    async def function(episode: Episode) -> float:
        loops.add(asyncio.get_running_loop())
        match episode.prompt.index:
            case 0:
                await ended.wait()
            case 1:
                await exits()
            case 2:
                await asyncio.gather(asyncio.sleep(0), exits())  # in a task of its own
            case 3:
                raise KeyboardInterrupt
            case 4:
                ended.set()
        return 1.0

    mine = EpisodeFunction(name="mine:play", function=function)

    async def play(index: int) -> Any:
        episode = Episode(prompt=Prompt(index=index, text="5>", answer=""), base_url="", server=None)  # type: ignore[arg-type]
        return await asyncio.wait_for(mine.play(episode), paced(20))

    async def all_of_them() -> list[Any]:
        first = asyncio.ensure_future(play(0))
        others = [await play(index) for index in range(1, 5)]
        return [await first, *others]

    waited, *raised, last = asyncio.run(all_of_them())
    assert (waited, last, len(loops)) == (1.0, 1.0, 1)
    exit_at = "SystemExit: bad argument (plugins/agents/tests/test_episodes.py:"
    for failure, error in zip(raised, (exit_at, exit_at, "KeyboardInterrupt"), strict=True):
        assert failure.message.startswith(f"samplers.episodes.function 'mine:play' raised {error}")
