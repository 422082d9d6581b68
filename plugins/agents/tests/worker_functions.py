"""What worker processes play."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from corerl_agents.episodes import Episode


def two_turns(episode: Episode) -> float:
    messages = episode.messages
    call = episode.chat(messages, max_tokens=3)
    messages += [call["message"], {"role": "tool", "content": episode.prompt.fields.get("tool", "9>")}]
    return float(len(episode.chat(messages, stream=True)["message"]["content"]))


def where(episode: Episode) -> float:
    episode.chat(episode.messages, max_tokens=1)
    return float(os.getpid())


def two_turns_there(episode: Episode) -> dict[str, float]:
    """With what tells workers from each other."""
    own = {"pid": os.getpid(), "word": float(os.environ.get("CORERL_TEST_WORD", "0"))}
    return {"said": two_turns(episode), **own}


def waits_for_a_word(episode: Episode, *, directory: str) -> float:
    """The first four write where they are."""
    episode.chat(episode.messages, max_tokens=1)
    Path(directory, f"{episode.prompt.index}-{threading.get_native_id()}").write_text(f"{os.getpid()}\n")
    while not Path(directory, "word").exists():
        time.sleep(0.02)
    return 1.0


def open_files(episode: Episode) -> float:
    """How many its process may have."""
    episode.chat(episode.messages, max_tokens=1)
    return float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def directory(episode: Episode) -> dict[str, float]:
    episode.chat(episode.messages, max_tokens=1)
    return {os.getcwd(): 1.0}


def heavy(episode: Episode) -> float:
    episode.chat(episode.messages, max_tokens=1)
    return float(len({"torch", "transformers", "starlette"} & sys.modules.keys()))


def refused(episode: Episode) -> None:
    episode.chat(episode.messages, n=2)


def is_first(file: str) -> bool:
    """Whether no process was here before; it leaves its number."""
    try:
        with Path(file).open("x") as created:
            created.write(f"{os.getpid()}\n")
    except FileExistsError:
        return False
    return True


def waits_for_its_end(episode: Episode, *, directory: str, first: int) -> float:
    """The first episodes write where they are, and wait to be killed."""
    episode.chat(episode.messages, max_tokens=1)
    for number in range(first):
        if is_first(f"{directory}/{number}"):
            time.sleep(600)
    return 1.0


def ends_its_process(episode: Episode) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_once(episode: Episode, *, file: str) -> float:
    episode.chat(episode.messages, max_tokens=1)
    if is_first(file):
        time.sleep(600)
    return float(os.getpid())


def holds_the_gil_once(episode: Episode, *, file: str) -> float:
    """With a process of its own, which has left its group."""
    episode.chat(episode.messages, max_tokens=1)
    if is_first(file):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(file).write_text(f"{os.getpid()} {child.pid}")
        ctypes.PyDLL(None).sleep(600)
    return float(os.getpid())


async def waits_once(episode: Episode, *, file: str) -> float:
    await episode.chat_async(episode.messages, max_tokens=1)
    if is_first(file):
        await asyncio.sleep(600)
    return float(os.getpid())


def white_twice_black_once(episode: Episode) -> dict[str, object]:
    """The longer white's last answer, the more it gets, and the less black does."""
    white, black, messages = episode.role("white"), episode.role("black"), episode.messages
    asked = [{"role": "user", "content": episode.prompt.text + ">"}]
    asked += [white.chat(asked, max_tokens=2)["message"], *messages]
    black.chat(messages, max_tokens=2)
    said = len(white.chat(asked, max_tokens=3)["message"]["content"])
    return {"white": {"said": said, "cost": -0.5}, "black": -said}
