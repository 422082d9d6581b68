"""Rewards that a user might write, as a module that a reward's own process imports by name."""

import asyncio
import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path

from corerl.data.prompts import Prompt


def act(prompt: Prompt, response: str, *, seconds: float = 0.0) -> float:
    """What the response says; else its length."""
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


async def promised(prompt: Prompt, response: str) -> dict[str, float]:
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


def alarmed(prompt: Prompt, response: str, *, hidden: bool = False, only: str = "") -> float:
    """Limits its own time, as many graders of mathematics do, on all responses or on `only` one."""
    if response != (only or response):
        return 0.0
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    except ValueError as error:
        if hidden:
            raise RuntimeError("cannot grade") from error
        raise
    return 1.0


def lazy(prompt: Prompt, response: str) -> float:
    """Needs the main thread, and sleeps beyond its time on one response."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    time.sleep(600 if response == "sync" else 0.0)
    return 1.0


def picky(prompt: Prompt, response: str) -> float:
    raise KeyError(response)
