"""Import modules once, in a server from which Ray's workers are forked: each would import them for seconds.

`fork_server` starts the server, a Python process that never has threads, Ray or a device of its own. To start a worker,
Ray runs this file (`py_executable`), which imports next to nothing: it asks the server for the worker, and ends with
it. The other way round, the server kills a worker for which nobody waits any more, as when Ray's raylet has ended.
Where no server answers, this file becomes the usual worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux, from linux/prctl.h
LARGEST = 2**20  # bytes of a request
OOM_SCORE = "/proc/self/oom_score_adj"
PATIENCE_SECONDS = 30.0  # with a server that still imports: Ray gives a worker 60 until it registers
STREAMS = 3  # file descriptors of a request: those of stdin, stdout and stderr


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
    those that it cannot import are left to the workers. None if there are no modules, on systems other than Linux, and
    where the server cannot be reached."""
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)  # at once: who asks early waits
        listening.listen(128)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited; Ray's processes block it too
        try:
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listening.fileno()), str(os.getpid()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
    stack.callback(server.wait)
    stack.callback(server.kill)
    return shlex.join([sys.executable, "-PSE", __file__, path])


def end_with_parent() -> None:
    """Let the kernel end this process with its parent."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(listening: socket.socket, modules: Iterable[str]) -> tuple[dict[str, Any], list[int]]:
    """Fork the workers that are asked for; returns in each of them, with its request and its streams."""
    import importlib

    gc.disable()
    for module in modules:
        with contextlib.suppress(Exception):  # it is raised again where it is needed
            importlib.import_module(module)
    gc.freeze()  # a collection would write to all pages, which are shared until then
    gc.enable()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a fork would lack the threads that a module has started")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what has ended leaves no zombie
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not listening:  # Ray's process for this worker has ended
                with contextlib.suppress(ProcessLookupError):  # and so has the worker
                    signal.pidfd_send_signal(key.data, signal.SIGKILL)
                waiting.unregister(key.fd)
                os.close(key.data)
                os.close(key.fd)
                continue
            with contextlib.suppress(OSError):  # such as no memory for a process: who asks becomes the usual worker
                if (forked := _fork(listening.accept()[0], waiting)) is not None:
                    return forked


def _fork(asking: socket.socket, waiting: selectors.BaseSelector) -> tuple[dict[str, Any], list[int]] | None:
    """Fork the worker for which this connection asks: its request and its streams there, None in the server."""
    with asking:
        body, streams, _, _ = socket.recv_fds(asking, LARGEST, STREAMS)
        server, pid = os.getpid(), -1
        try:
            if body:
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
                if isinstance(key.fileobj, socket.socket):  # that is listened to
                    key.fileobj.close()
                else:  # of a worker that was forked before
                    os.close(key.fd)
                    os.close(key.data)
            waiting.close()
            return json.loads(body), streams
        if pid > 0:
            worker = os.pidfd_open(pid)  # fails if it has ended
            with contextlib.suppress(BrokenPipeError):
                socket.send_fds(asking, [b"forked"], [worker])
            waiting.register(asking.detach(), selectors.EVENT_READ, worker)
    return None


def become(request: Mapping[str, Any], streams: Iterable[int]) -> None:
    """Run the worker's script in this process, as Python would."""
    import runpy

    os.setpgid(0, 0)  # Ray ends a worker with its process group, in which the driver would be
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


# ---- what Ray starts -------------------------------------------------------------------------------------------------


def ask(path: str, arguments: list[str]) -> None:
    """Have the worker forked, and wait for its end. Returns if there is no server."""
    end_with_parent()
    request: dict[str, Any] = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        # Ray has set both for its worker.
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score": "0",
    }
    with contextlib.suppress(OSError), open(OOM_SCORE) as score:
        request["oom_score"] = score.read()
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(PATIENCE_SECONDS)
        asking.connect(path)
        socket.send_fds(asking, [json.dumps(request).encode()], range(STREAMS))
        _, [worker], _, _ = socket.recv_fds(asking, 32, 1)  # none, if the server has ended or could not fork
        select.select([worker], [], [])
        os._exit(0)


def main(arguments: list[str]) -> None:
    if arguments[0].isdecimal():
        end_with_parent()
        if os.getppid() == int(arguments[1]):  # else it has ended already
            become(*serve(socket.socket(fileno=int(arguments[0])), arguments[2:]))
    else:
        path, *rest = arguments
        ask(path, rest)
        os.execv(sys.executable, [sys.executable, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
