"""Render chat templates in a process of its own, with limits of time, memory and length that nothing in them passes.

A template comes with a model's files and is a program. Jinja's sandbox keeps it from files and from Python's insides,
but not from time and memory: one operation, such as `'a' * 10**10`, or a comparison of lists that have each other in
them forty times over, takes all there is, in C code that no other thread can interrupt. Limits inside the sandbox would
have to know every operator, method and filter that multiplies, and would refuse some of what honest templates do. The
kernel's limits hold for whatever a template does, but for a whole process. It imports Jinja but not torch, starts in
half a second when the first chat is rendered, and renders all others, as fast as it were done here; only one that its
template has ended is started anew.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from corerl.errors import ModelError
from corerl.messages import LONGEST_LINE, one_line, printable

WAITING = 120.0  # seconds, by the clock, to hear or be heard: the process may get little of a busy machine
READY, TEXT, FAILED, COSTLY = b"!", b"+", b"-", b"$"  # kinds of messages of the process: the first byte of each
# Sets this process's own sys.path, before the first import.
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from corerl.rollout.templates import Limits, serve
serve(Limits(**json.loads(sys.argv[2])))
"""


class TemplateFailed(Exception):
    """A template refuses what it was given, or fails at it; says why."""


class TemplateCostly(TemplateFailed):
    """A template takes more than it may, or ends its process; says how."""


@frozen(kw_only=True)
class Limits:
    """What the text of one chat may take."""

    seconds: float = 5.0  # of a core; honest templates take a thousandth
    memory: int = 2**29  # bytes, beside what the process has as it begins
    characters: int = 2**22  # of about a million tokens


class TemplateProcess:
    """The process, which runs from the first text that is asked for until `close`, as does the next one. Any thread may
    ask; one is served at a time. A fork of this process has none until it asks for one of its own."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: _Running | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def render(self, template: str, given: Mapping[str, Any]) -> str:
        """The text that `render_jinja_template` of transformers makes of one chat, with these arguments. Raises
        TemplateFailed, and ModelError if the process cannot start."""
        try:
            asked = pickle.dumps((template, dict(given)))
        except Exception as error:  # nested too deeply
            raise TemplateFailed(one_line(error)) from error
        kind, said = self._answer(asked)
        if kind != TEXT:
            raise (TemplateCostly if kind == COSTLY else TemplateFailed)(said)
        return said

    def _answer(self, asked: bytes) -> tuple[bytes, str]:
        with self._lock:
            again = True
            while True:
                running = self._running = self._running or _Running(self._limits)
                try:
                    return running.answer(asked)
                except BaseException as error:  # a late answer must not be taken for that to the next chat
                    status, self._running = running.end(), None
                    if isinstance(error, _Gone) and again and not running.killed:
                        again = False  # no fault of this template
                    elif isinstance(error, _Ended):
                        return COSTLY, self._how(status, late=isinstance(error, _Late))
                    else:
                        raise

    def _how(self, status: int, *, late: bool) -> str:
        if late:
            return f"keeps the process that renders it from answering for {WAITING:g} s"
        if status == -signal.SIGPROF:
            return f"takes more than {self._limits.seconds:g} s of CPU time"
        if status == -signal.SIGKILL:
            return "lost the process that renders it, which was killed from outside,"
        ended = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"ends the process that renders it ({ended})"

    def close(self) -> None:
        """End the process at once; a thread that waits for a text is told so."""
        if (running := self._running) is not None:
            running.kill()
        with self._lock:
            if self._running is not None:
                self._running.end()
                self._running = None

    def _forget(self) -> None:
        self._lock = threading.Lock()
        if self._running is not None:
            self._running.leave()
            self._running = None


class _Ended(Exception):
    """The process has not answered."""


class _Late(_Ended):
    """Its time is up."""


class _Gone(_Ended):
    """It had ended before it had read the question."""


class _Running:
    """A process that has started."""

    killed = False  # by `kill`

    def __init__(self, limits: Limits) -> None:
        command = [sys.executable, "-P", "-c", START, json.dumps(sys.path), json.dumps(asdict(limits))]
        self._most = 4 * max(limits.characters, LONGEST_LINE)  # bytes of an answer
        self._connection, theirs = Pipe()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(int(WAITING * 1e6), 1_000_000)))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C is for this process
            )
        finally:
            theirs.close()
        try:
            if self._hear()[0] != READY:
                raise _Ended
        except BaseException as error:
            status = self.end()
            if isinstance(error, _Ended):
                raise ModelError(
                    f"the process that renders chat templates ended with status {status} as it started; see what "
                    f"{sys.executable} -c 'import transformers.utils.chat_template_utils' says"
                ) from None
            raise

    def answer(self, asked: bytes) -> tuple[bytes, str]:
        """The kind of the answer, and what it says. Raises _Ended, _Late or _Gone."""
        try:
            self._connection.send_bytes(asked)
        except BlockingIOError as error:
            raise _Late from error
        except OSError as error:  # it was killed while it had nothing to do
            raise _Gone from error
        return self._hear()

    def _hear(self) -> tuple[bytes, str]:
        try:
            said = self._connection.recv_bytes(self._most)  # of bytes only: a template may have taken the process over
        except BlockingIOError as error:
            raise _Late from error
        except (EOFError, OSError) as error:
            raise _Ended from error
        return said[:1], said[1:].decode("utf-8", "replace")

    def end(self) -> int:
        """End the process, unless it has ended; returns its status."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(1.0)
        self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        self.killed = True
        self._process.kill()

    def leave(self) -> None:
        """In a fork of the process that has started it, let it be that one's alone."""
        self._connection.close()
        self._process.returncode = 0  # nobody here waits for it


SHARED = TemplateProcess(Limits())
atexit.register(SHARED.close)


# ---- in the process --------------------------------------------------------------------------------------------------


def serve(limits: Limits) -> None:
    """Answer each chat that comes through standard input, a socket, until its other end is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is doing
    import_module("transformers.utils.chat_template_utils")
    _limit_memory(limits.memory)
    with contextlib.suppress(EOFError, ConnectionError), Connection(0) as connection:
        connection.send_bytes(READY)
        while True:
            asked = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            kind, said = attempt(asked, limits)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(kind + said.encode())


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def attempt(asked: bytes, limits: Limits) -> tuple[bytes, str]:
    """A chat's text in this process, or why it has none, behind which of both it is."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes half a second

    try:
        template, given = pickle.loads(asked)
        text = render_jinja_template(chat_template=template, **given)[0][0]
        if len(text) > limits.characters:
            return FAILED, f"its text has {len(text)} characters, at most {limits.characters} are allowed"
        text.encode()  # which half a surrogate pair does not let
        return TEXT, str(text)
    except MemoryError:
        return COSTLY, f"takes more than {limits.memory / 2**20:g} MiB of memory"
    # Templates may reject system messages or roles that do not alternate. They are also programs, and may fail on any
    # input they were not written for, in any way.
    except Exception as error:
        return FAILED, printable(one_line(error)[:LONGEST_LINE])[:LONGEST_LINE]
