"""Why a process is gone, in one line: from an error of Ray's, or because its heartbeats say that it hangs."""

from __future__ import annotations

import re
from typing import Literal

from attrs import frozen
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

from corerl.cluster.nodes import logs
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
KILLED = "its process was killed"
WHAT = {"died": "its process died", "out of memory": "its process was killed by Ray", "hung": KILLED, "overdue": KILLED}


@frozen(kw_only=True)
class Failure:
    """The end of one process, as a WorkerDied says it."""

    kind: Literal["died", "out of memory", "hung", "overdue"]
    who: str  # such as "actor rank 3"
    step: str = ""  # the call it was in, such as "train at optimizer step 12"
    cause: str  # and what to do
    details: str = ""  # Ray's own words

    def __str__(self) -> str:
        during = f" during {self.step}" if self.step else ""
        return f"{self.who}: {WHAT[self.kind]}{during}{self.cause}"

    @property
    def error(self) -> WorkerDied:
        error = WorkerDied(str(self))
        error.details = self.details
        return error

    @classmethod
    def of(cls, error: RayError, who: str, step: str, hook: str = "") -> Failure | None:
        """The failure that Ray reports; None if the process may still be there. `hook` is of its last heartbeat."""
        if not _ended(error):
            return None
        if isinstance(error, OutOfMemoryError):
            cause = f": {_out_of_memory(str(error))}"
            return cls(kind="out of memory", who=who, step=step, cause=cause, details=str(error))
        last = f"; last heartbeat in the hook {hook}" if hook else ""
        cause = (
            f" ({words(error)}{last}); unless someone killed it, see the machine's log (dmesg: out of memory?) and "
            f"Ray's logs ({logs()})"
        )
        return cls(kind="died", who=who, step=step, cause=cause, details=str(error))

    @classmethod
    def hung(cls, who: str, seconds: float, why: str) -> Failure:
        """Of a process that is killed because it has sent no heartbeat for so many seconds."""
        return cls(kind="hung", who=who, cause=f": no heartbeat for {seconds:g} s (cluster.health_timeout): {why}")

    @classmethod
    def overdue(cls, who: str, seconds: float, where: str) -> Failure:
        """Of a process that is killed because its start takes too long."""
        cause = f": not started after {seconds:g} s of work (cluster.start_timeout): {where}"
        return cls(kind="overdue", who=who, cause=cause)


def _ended(error: RayError) -> bool:
    if isinstance(error, RayTaskError):
        return False  # an exception inside the process, although its type may also be that of its cause
    if isinstance(error, RaySystemError):
        return error.traceback_str is None  # with one, a result could not be read here
    return isinstance(error, ENDED)


def words(error: RayError) -> str:
    """Why Ray says that the process has ended, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError) and error.actor_init_failed:
        lines = lines[-1:]  # of a traceback
    text = " ".join(line for line in lines if not COMMON.match(line)) or " ".join(lines)
    detail = text.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return shorten(detail.rstrip("."), LONGEST)


def _out_of_memory(text: str) -> str:
    """Ray's page of numbers in one line: what this process had, what its machine has, and what to do."""
    machine = MACHINE.search(text)
    entries = [line for line in text.splitlines() if "Selected to kill" in line]
    had = [each for entry in entries for each in PROCESS.findall(entry)]
    numbers = [
        *([f"the process had {had[0]} GB"] if len(had) == 1 else []),  # of several, Ray does not say which it was
        *([f"{machine[1]} of the machine's {machine[2]} GB were in use"] if machine else []),
    ]
    known = f" ({', '.join(numbers)})" if numbers else ""
    return (
        f"the machine ran out of memory{known}; end other programs there, use fewer ranks or engines on it, a lower "
        "precision or smaller batches, or raise Ray's limit (the variable RAY_memory_usage_threshold, 0.95 by default)"
    )
