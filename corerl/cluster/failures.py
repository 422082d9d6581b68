"""Tell from an error of Ray's whether a process has ended, and why, in one line."""

from __future__ import annotations

import re

from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from corerl.cluster.services import logs
from corerl.cluster.watchdog import Status, described
from corerl.errors import WorkerDied
from corerl.messages import shorten

# Ended, never started, or gone with its machine and its last answer. Ray's types share no base but RayError.
ENDED = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    LocalRayletDiedError,
    WorkerCrashedError,
    ObjectLostError,
    RuntimeEnvSetupError,
    ActorPlacementGroupRemoved,
    TaskPlacementGroupRemoved,
    ActorUnschedulableError,
    TaskUnschedulableError,
)
LONGEST = 300  # characters of Ray's own words
# Lines of an ActorDiedError that are the same in all, or describe the actor in Ray's terms.
COMMON = re.compile(r"The actor died unexpectedly|The actor never ran|\s*(class_name|actor_id|pid|name|namespace|ip): ")
# "Memory on the node (...) was 51.33GB used / 54.00GB limit (0.95)"; and of each process that was ended "memory
# used=3.33GB".
MACHINE = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB")
PROCESS = re.compile(r"memory used=([\d.]+)GB")


def death(name: str, method: str, error: RayError, status: Status | None = None) -> WorkerDied | None:
    """The error of process `name` if it ended during `method`; None if it may still be there. `status` is its last."""
    if not _ended(error):
        return None
    if isinstance(error, OutOfMemoryError):
        died = WorkerDied(f"{name}: Ray ended its process during {method} because {_out_of_memory(str(error))}")
    else:
        died = WorkerDied(
            f"{name}: its process died during {method} ({cause(error)}{_heard_in(status)}); unless someone killed it, "
            f"see the machine's log (dmesg: out of memory?) and Ray's logs ({logs()})"
        )
    died.details = str(error)
    return died


def _heard_in(status: Status | None) -> str:
    return f"; last heard of in the hook {status.hook}" if status is not None and status.hook else ""


def silent(name: str, method: str, seconds: float) -> WorkerDied:
    """The error of a process that was ended because it had become silent."""
    return WorkerDied(
        f"{name}: its process had not said for {seconds:g} s (cluster.health_timeout) where it is in {method}, and was "
        "ended: it was frozen, as by a debugger, SIGSTOP or a machine that swaps, or native code held Python's GIL all "
        "that time; raise cluster.health_timeout if that is as it should be"
    )


def overdue(name: str, method: str, seconds: float, status: Status | None) -> WorkerDied:
    """The error of a process that was ended because its start took too long."""
    return WorkerDied(
        f"{name}: its process had not started after {seconds:g} s of work in {method} (cluster.start_timeout), and was "
        f"ended: {described(name, status)}; raise cluster.start_timeout if it may take that long"
    )


def _ended(error: RayError) -> bool:
    if isinstance(error, RayTaskError):
        return False  # an exception inside the process, although its type may also be that of its cause
    if isinstance(error, RaySystemError):
        return error.traceback_str is None  # with one, a result could not be read here
    return isinstance(error, ENDED)


def cause(error: RayError) -> str:
    """Why Ray says that the process has ended, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        lines = lines[-1:]  # of a traceback
    told = " ".join(line for line in lines if not COMMON.match(line)) or " ".join(lines)
    detail = told.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return shorten(detail.rstrip("."), LONGEST)


def _out_of_memory(text: str) -> str:
    """Ray's page of numbers in one line: what this process had, what its machine has, and what to do."""
    machine = MACHINE.search(text)
    had = _had(text)
    numbers = [
        *([f"the process had {had} GB"] if had else []),
        *([f"{machine[1]} of the machine's {machine[2]} GB were in use"] if machine else []),
    ]
    known = f" ({', '.join(numbers)})" if numbers else ""
    return (
        f"the machine ran out of memory{known}; end other programs there, use fewer ranks or engines on it, a lower "
        "precision or smaller batches, or raise Ray's limit (the variable RAY_memory_usage_threshold, 0.95 by default)"
    )


def _had(text: str) -> str:
    """GB that the process had; "" if Ray ended several at once, and does not say which of them it was."""
    entries = [line for line in text.splitlines() if "Selected to kill" in line]
    found = [each for entry in entries for each in PROCESS.findall(entry)]
    return found[0] if len(found) == 1 else ""
