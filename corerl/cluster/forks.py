"""Import modules once, in a server from which Ray's workers are forked: each would import them for seconds.

`fork_server` starts the server, a Python process that never has threads, Ray or a device of its own. To start a worker,
Ray runs this file (`py_executable`), which imports next to nothing: it asks the server for the worker, hands signals on
to it, and ends as it does. The other way round, the server kills a worker for which nobody waits any more, as when
Ray's raylet has ended. Where no server answers, this file becomes the usual worker.

A request is a JSON object with the three streams' file descriptors, the answers are the worker's process id and, in the
end, its status as `os.waitpid` gives it. The tests' own server (`tests/forks`) is made of the same parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # of Linux, from linux/prctl.h
LARGEST = 2**20  # bytes of a request
ANSWER = 32  # bytes of an answer, at most
OOM_SCORE = "/proc/self/oom_score_adj"
PATIENCE_SECONDS = 30.0  # with a server that still imports: Ray gives a worker 60 until it registers
STREAMS = 3  # file descriptors of a request: those of stdin, stdout and stderr
COME_BACK = {"jemalloc_bg_thd"}  # threads that their library starts again in a fork


class Forks:
    """How workers start while there is a server."""

    def __init__(self, command: str, environment: Mapping[str, str]) -> None:
        """`environment` is the server's."""
        self._command, self._environment = command, environment

    def command(self, environment: Mapping[str, str]) -> str:
        """What Ray shall run in place of Python for a worker with these variables; "" for Python itself. Libraries read
        variables as they are imported, so the server must have the same."""
        return self._command if environment.items() <= self._environment.items() else ""


@contextlib.contextmanager
def fork_server(modules: Collection[str], environment: Mapping[str, str]) -> Iterator[Forks | None]:
    """While the block runs, workers of this environment can be forked from a process that has imported the modules;
    those that it cannot import are left to the workers. If one starts threads, which a fork would lack, the server says
    so on stderr and ends. None if there are no modules, on systems other than Linux, and where the server cannot be
    reached."""
    with contextlib.ExitStack() as stack:
        forks: Forks | None = None
        if modules and hasattr(os, "pidfd_open"):
            own = {**os.environ, **environment}
            with contextlib.suppress(OSError):  # such as a path too long for a socket
                forks = Forks(_start(modules, own, stack), own)
        yield forks


def _start(modules: Iterable[str], environment: Mapping[str, str], stack: contextlib.ExitStack) -> str:
    """Start a server that `stack` ends; returns the command for workers."""
    import shlex
    import subprocess
    import tempfile

    path = os.path.join(stack.enter_context(tempfile.TemporaryDirectory(prefix="corerl-")), "socket")
    with listen(path) as listening:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited; Ray's processes block it too
        try:
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listening.fileno()), str(os.getpid()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
    stack.callback(server.wait)
    stack.callback(server.kill)
    return shlex.join([sys.executable, "-PSE", __file__, path])


def listen(path: str) -> socket.socket:
    """For a server that is yet to start: who asks early waits."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(path)
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def end_with_parent() -> None:
    """Let the kernel end this process with its parent."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the server ------------------------------------------------------------------------------------------------------


def import_all(modules: Iterable[str]) -> None:
    """Import what can be imported, without a word of the modules' own. Ends this process, in one line, if one has
    started threads."""
    import importlib

    stderr, starting = os.dup(2), ""
    os.dup2(1, 2)  # the server's stdout is nowhere
    for module in modules:
        with contextlib.suppress(Exception):  # it is raised again where it is needed
            importlib.import_module(module)
        starting = starting or (module if threads() else "")
    os.dup2(stderr, 2)
    os.close(stderr)
    if threads():
        sys.exit(
            f"corerl: note: {starting} starts threads when it is imported, which forked ranks and engines would lack, "
            "so each of them imports its modules by itself, which takes seconds; start threads later, or set "
            "OMP_NUM_THREADS to 1 if they are a math library's"
        )


def threads() -> list[str]:
    """The names of this process's threads that a fork would lack."""
    names = []
    for task in {*os.listdir("/proc/self/task")} - {str(os.getpid())}:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:  # it may have ended
            names.append(comm.read().strip())
    return [name for name in names if name not in COME_BACK]


def serve(listening: socket.socket, owner: int, prepare: Callable[[], object]) -> tuple[dict[str, Any], list[int]]:
    """Fork the processes that are asked for, until the process `owner` has ended; returns in each of them, with its
    request and its streams. What `prepare` leaves is never looked through for garbage."""
    owning = os.pidfd_open(owner)
    gc.disable()
    prepare()
    gc.freeze()  # a collection would write to all pages, which are shared until then
    gc.enable()
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    waiting.register(owning, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select()[:1]:  # others come again, if they still are what they were
            if key.fileobj is listening:
                with contextlib.suppress(OSError):  # such as too many files: whoever asks becomes the usual worker
                    waiting.register(listening.accept()[0], selectors.EVENT_READ)
            elif key.fileobj == owning:
                os._exit(0)  # what it has forked ends with it
            elif not isinstance(key.fileobj, socket.socket):  # of a process that has ended
                pid, asking = key.data
                waiting.unregister(key.fd)
                os.close(key.fd)
                _answer(asking, os.waitpid(pid, 0)[1])
                _forget(asking, waiting)
            elif key.data is not None:  # whoever asked for this process has gone
                signal.pidfd_send_signal(key.data, signal.SIGKILL)
                _forget(key.fileobj, waiting)
            else:
                try:
                    forked = _fork(key.fileobj, waiting)
                except OSError:  # such as no memory for a process
                    _forget(key.fileobj, waiting)
                    continue
                if forked is not None:
                    return forked


def _fork(asking: socket.socket, waiting: selectors.BaseSelector) -> tuple[dict[str, Any], list[int]] | None:
    """Fork the process for which this connection asks: its request and its streams there, None in the server."""
    body, streams, _, _ = socket.recv_fds(asking, LARGEST, STREAMS)
    if not body:  # it asks for nothing
        _forget(asking, waiting)
        return None
    server, pid = os.getpid(), -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            for stream in streams:
                os.close(stream)
    if pid == 0:
        end_with_parent()
        if os.getppid() != server:  # it has ended before
            os._exit(1)
        for key in [*waiting.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        waiting.close()
        return json.loads(body), streams
    try:
        process = os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    _answer(asking, pid)
    waiting.modify(asking, selectors.EVENT_READ, process)
    waiting.register(process, selectors.EVENT_READ, (pid, asking))
    return None


def _answer(asking: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it has gone
        asking.send(str(number).encode())


def _forget(asking: socket.socket, waiting: selectors.BaseSelector) -> None:
    with contextlib.suppress(KeyError, ValueError):  # it was forgotten before
        waiting.unregister(asking)
    asking.close()


def become(request: Mapping[str, Any], streams: Iterable[int]) -> None:
    """Make of this fork the process that was asked for, as far as it shows from outside."""
    if request["leads"]:
        os.setsid()
    else:
        os.setpgid(0, 0)  # Ray ends a worker with its process group, in which the driver would be
    for number, stream in enumerate(streams):  # none of 0 to 2: the server has its own there
        os.dup2(stream, number)
        os.close(stream)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all have the same state; Python's own modules see to that themselves
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    with contextlib.suppress(OSError, ValueError):  # the server's hard limit may be lower
        resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    with contextlib.suppress(OSError), open(OOM_SCORE, "w") as score:
        score.write(request["oom_score"])
    sys.argv[:] = request["arguments"]


# ---- who asks it -----------------------------------------------------------------------------------------------------


def request_of(arguments: list[str]) -> dict[str, Any]:
    """For a process that is as this one, but for its arguments."""
    request: dict[str, Any] = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "leads": False,  # a session of its own
        # Ray has set both for its worker.
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score": "0",
    }
    with contextlib.suppress(OSError), open(OOM_SCORE) as score:
        request["oom_score"] = score.read()
    return request


def ask(path: str, request: Mapping[str, Any], patience: float | None = PATIENCE_SECONDS) -> None:
    """Be the process that is asked for, as whoever started this one sees it. Returns if it cannot be forked; `patience`
    is in seconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(patience)
        try:
            asking.connect(path)
            socket.send_fds(asking, [json.dumps(request).encode()], range(STREAMS))
            pid = int(asking.recv(ANSWER))  # nothing, if the server has ended or could not fork
        except (OSError, ValueError):
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: _hand_on(number, pid))
        asking.settimeout(None)
        status = int(signal.SIGKILL)  # of the server's workers once it has ended
        with contextlib.suppress(OSError, ValueError):
            status = int(asking.recv(ANSWER))
    _end(os.waitstatus_to_exitcode(status))


def _hand_on(number: int, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def _end(status: int) -> NoReturn:
    """End as a process with this exit status has, or this signal where it is negative."""
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # there is nothing to see in this one's
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def main(arguments: list[str]) -> None:
    import runpy

    if arguments[0].isdecimal():
        listening, owner, *modules = arguments
        become(*serve(socket.socket(fileno=int(listening)), int(owner), lambda: import_all(modules)))
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        end_with_parent()
        path, *rest = arguments
        ask(path, request_of(rest))
        os.execv(sys.executable, [sys.executable, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
