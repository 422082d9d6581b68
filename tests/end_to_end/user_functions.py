"""Functions that a user might write, named in a config as 'tests.end_to_end.user_functions:constant'."""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

from corerl.data.prompts import Prompt


def constant(prompt: Prompt, response: str) -> float:
    return 0.25


def kind(response: str) -> int:
    """0 to 31, about as often each."""
    return zlib.crc32(response.encode()) % 32


def held(scored: Any) -> Any:
    """Each step is held until its file `go` is there; one in the working directory says that it is at it."""
    Path(f"at-{scored.step}").touch()
    while not Path(f"go-{scored.step}").exists():
        time.sleep(0.01)
    return scored


def slow(scored: Any) -> Any:
    """A run that only has to be there leaves the cores to others."""
    time.sleep(0.5)
    return scored


def shot_after(answer: str, directory: str | Path) -> Path:
    """The picture that the tool of `play_with_shots` shows after this answer."""
    return Path(directory) / f"shot-{kind(answer) % 3}.png"


def play_with_shots(episode: Any, *, directory: str) -> float:
    """Two answers, with a picture between them that the first one chooses."""
    messages = episode.messages
    messages.append(episode.chat(messages, max_tokens=3)["message"])
    shot = episode.picture(shot_after(messages[-1]["content"], directory))
    messages.append({"role": "tool", "content": [shot, {"type": "text", "text": "="}]})
    return kind(episode.chat(messages)["message"]["content"]) / 32
