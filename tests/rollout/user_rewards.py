"""Rewards that a user might write, as a module that a reward's own process imports by name."""

import asyncio
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from corerl.data.prompts import Prompt


def _note(response: str, directory: str) -> None:
    if directory:
        with Path(directory, "calls").open("a") as calls:
            calls.write(response + "\n")


def act(prompt: Prompt, response: str, *, seconds: float = 0.0, directory: str = "") -> float:
    """What the response says; else its length. Each call leaves a line in the directory."""
    _note(response, directory)
    time.sleep(seconds)
    match response:
        case "raise":
            raise KeyError("x\ny")
        case "nan":
            return float("nan")
        case "loop":
            while True:
                pass
        case "regular":  # an expression that takes for ever on this text
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "sleep":
            time.sleep(600)
        case "stuck":  # as in C that looks at no signal
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(600)
        case "exit":
            os._exit(3)
        case "leave":
            raise SystemExit(4)
        case "segfault":
            ctypes.string_at(0)
    return float(len(response))


def pid(prompt: Prompt, response: str) -> float:
    time.sleep(0.05)
    return float(os.getpid())


def without_torch(prompt: Prompt, response: str) -> float:
    """Whether its process runs without what takes seconds and hundreds of MiB to import."""
    return float(not {"torch", "transformers", "ray"} & sys.modules.keys())


async def promised(prompt: Prompt, response: str, *, directory: str = "") -> dict[str, float]:
    _note(response, directory)
    match response:
        case "exit":
            os._exit(3)
        case "block":
            time.sleep(600)  # as code that is not async
        case "sleep":
            await asyncio.sleep(600)
    return {"length": float(len(response))}


def mark(prompt: Prompt, response: str, *, directory: str) -> float:
    """Leave the process's id, then never come back."""
    Path(directory, str(os.getpid())).touch()
    while True:
        pass


SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def parent(prompt: Prompt, response: str, *, directory: str) -> float:
    """`act`, after starting one process in the group of this one, one in a session of its own, and one by
    multiprocessing, whose ids it leaves with its own."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    forked.start()
    started = [subprocess.Popen(SLEEPS, start_new_session=own).pid for own in (False, True)]
    for pid, kind in zip((*started, forked.pid, os.getpid()), ("", "own session", "", ""), strict=True):
        Path(directory, str(pid)).write_text(kind)
    return act(prompt, response)


def lazy(prompt: Prompt, response: str, *, seconds: float) -> float:
    """Needs the main thread."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    time.sleep(seconds)
    return 1.0
