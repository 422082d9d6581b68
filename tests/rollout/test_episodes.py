"""What a user's function may be, and what it is given."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from corerl.data.prompts import Prompt
from corerl.errors import ConfigError
from corerl.rollout.episodes import Episode, EpisodeFunction, resolve_function
from corerl.rollout.rewards import Failure


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


def test_an_async_function_that_exits_fails_its_own_episode_and_no_other_under_way_or_after_it() -> None:
    begun, loops = threading.Event(), set()
    ended = asyncio.Event()

    async def exits() -> None:
        sys.exit("bad argument")

    async def function(episode: Episode) -> float:
        loops.add(asyncio.get_running_loop())
        match episode.prompt.index:
            case 0:
                begun.set()
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
    outcomes: dict[int, float | Failure | None] = {}

    def play(index: int) -> None:
        prompt = Prompt(index=index, text="5>", answer="")
        outcomes[index] = mine.play(Episode(prompt=prompt, base_url="", client=None), timeout=10.0)  # type: ignore[arg-type]

    threads = [threading.Thread(target=play, args=(index,), daemon=True) for index in range(5)]
    threads[0].start()
    assert begun.wait(20)
    for thread in threads[1:]:
        thread.start()
        thread.join(10)
    threads[0].join(10)
    said = {index: each.message if isinstance(each, Failure) else each for index, each in outcomes.items()}
    raised = "rollout.function 'mine:play' raised"
    assert {index: each for index, each in said.items() if index in (0, 4)} == {0: 1.0, 4: 1.0}
    exit_at = f"{raised} SystemExit: bad argument (tests/rollout/test_episodes.py:"
    assert all(str(said[index]).startswith(exit_at) for index in (1, 2))
    assert str(said[3]).startswith(f"{raised} KeyboardInterrupt")
    assert len(loops) == 1
