"""A process that has imported what the processes of tests import, and forks them on request: what takes four seconds of
CPU time takes a few milliseconds. `python -m tests.forks.server DIRECTORY PID` serves until the process PID is gone, at
the socket that is its stdin.

It is the server of `corerl.cluster.forks`, whose requests have two more entries: the `code` that the process runs as
__main__, and the `session` of who asks. Each process writes the latter and when it began to DIRECTORY/processes: it is
in the server's session.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import tomllib
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from corerl.cluster import forks

# What only some environments have, and what these import as they build a model.
BACKENDS = ["corerl_megatron.backend", "corerl_deepspeed.backend", "torch._inductor.compile_fx"]
# Together they import nearly all of what ranks, engines and drivers run. Ray is not among them: it reads its variables
# when it is imported.
PRELOAD = [
    *("corerl.trainer.worker", "corerl.engines.service", "corerl_transformers.engine"),
    *(
        "corerl.rollout.source",
        "corerl.rollout.asynchronous",
        "corerl.rollout.ordered",
        "corerl_agents.sampler",
        "corerl.rollout.rewards",
    ),
    *("corerl.data.prompts", "corerl.checkpoint.reader", "corerl.plan.resolve", "corerl.config.load"),
    *("corerl_observe.console", "corerl_testing.plain.backend", "corerl_fsdp.backend"),
    *("corerl_testing.scenarios.states", "corerl_testing.scenarios.training"),
    "transformers.models.qwen3.modeling_qwen3",
    *BACKENDS,
    "pytest",  # which what ranks do for tests imports
    *("google.protobuf", "packaging", "yaml", "msgpack", "psutil", "click", "jsonschema", "requests", "filelock"),
    *("pydantic.v1", "pdb"),  # Ray's workers import these
]
ROOT = str(Path(__file__).resolve().parents[2])  # its own PYTHONPATH
PYTHON = Path(__file__).with_name("python.py")
FORK_PYTHON = "CORERL_TEST_FORK_PYTHON"  # how many generations of programs, after this one, have theirs forked
PROCESSES = "processes"
SELDOM = (10_000, 20, 100)  # when to look for garbage: in what tests import there is next to none


def main(directory: Path, owner: int) -> dict[str, Any]:
    """Serve; returns only in a process that was forked, with its request."""
    # Whoever has started it may have had others, such as a socket of gloo's, on which all that is forked would listen.
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    (directory / PROCESSES).mkdir()
    request, streams = forks.serve(socket.socket(fileno=0), owner, prepare)
    forks.become(request, streams)
    own = str(os.getpid())
    (directory / PROCESSES / own).write_text(f"{request['session']} {began(own)}")
    settle()
    return request


def began(pid: str) -> str:
    """When a process that lives began, in the kernel's ticks."""
    state, *_, ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
    return "" if state == "Z" else ticks


def prepare() -> None:
    preload()
    warm_up()
    keep()
    assert not (others := forks.threads()), f"only one thread survives a fork: {others}"


def preload() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in PRELOAD:
            with contextlib.suppress(ModuleNotFoundError):  # the worker that needs it says so
                importlib.import_module(module)


def warm_up() -> None:
    """Start a rank of a small model: the first one of a process takes 0.1 s more than others. What runs ask of their
    model, it has answered: that takes each of their processes another 70 ms."""
    from corerl.config import ModelConfig
    from corerl.models import choose_layout, hf_config, meta_model, unread_parameters
    from corerl_testing.harness import Setup, start
    from corerl_testing.models import tiny_fields
    from tests.end_to_end.small import SMALL

    worker, _ = start(Setup(backend="plain", model="", fields=tiny_fields("qwen3")))
    worker.shutdown("warm")
    model = meta_model(hf_config(ModelConfig(config=tomllib.loads(SMALL)["model"]["config"])))
    choose_layout(model, "auto")
    unread_parameters(model)


def keep() -> None:
    """What was imported is looked through once: a collection in a forked process would copy every page. Nor is it worth
    the time to take torch's two hundred operator libraries back at the end of each."""
    gc.set_threshold(*SELDOM)
    gc.collect()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (found := each.peek()) and found[1].__module__.startswith("torch."):
            each.atexit = False


def settle() -> None:
    """Make of this fork what a new interpreter would be."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    theirs = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    script = str(Path(sys.argv[0]).parent) if os.path.sep in sys.argv[0] else ""
    sys.path[:] = [script, *theirs, *(path for path in sys.path[1:] if path != ROOT), ROOT]
    # A process has to find the tests' own modules by itself; and wandb makes directories as it is imported, which each
    # process that has it would remove at its end.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "wandb")]:
        del sys.modules[name]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115  -- for good
        text = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" or os.isatty(number),
            write_through=unbuffered and number > 0,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    import torch

    # What torch reads of the environment as it is imported.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def forking(start: Callable[..., None]) -> Callable[..., None]:
    """For `subprocess.Popen.__init__`, which it is given: Python programs are forked. (Other modules may hold the class
    itself.)"""

    def init(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        if isinstance(args, list | tuple) and args[0] == sys.executable:
            args = [sys.executable, "-SE", PYTHON, *args[1:]]
        start(self, args, *rest, **named)

    return init


def run(request: dict[str, Any]) -> None:
    """The request's code, as a program of its own."""
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if (generations := int(os.environ.get(FORK_PYTHON, "0"))) > 0:
        os.environ[FORK_PYTHON] = str(generations - 1)
        subprocess.Popen.__init__ = forking(subprocess.Popen.__init__)  # type: ignore[method-assign]
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if os.path.isfile(request["arguments"][0]):
        module.__file__ = request["arguments"][0]  # what multiprocessing imports in the processes that it spawns
    sys.modules["__main__"] = module
    code, status = compile(request["code"], "<forked>", "exec"), None
    try:
        exec(code, module.__dict__)
    except SystemExit as ended:
        status = ended.code
    end(status)


def end(status: Any) -> NoReturn:
    """End as an interpreter does, but leave the objects as they are: to take each apart, which writes to every page
    that is shared with the server, would be most of what a short program costs."""
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  -- waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:  # it is closed
            continue
        except OSError:  # nobody reads it
            status = 120
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    try:
        asked = main(Path(sys.argv[1]), int(sys.argv[2]))
    except Exception:
        traceback.print_exc()
        os._exit(1)
    run(asked)
