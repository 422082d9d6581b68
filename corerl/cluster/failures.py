"""Why a process is gone, in one line, from an error of Ray's."""

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
# "Memory on the node (...) was 51.33GB used / 54.00GB limit (0.95)"
MEMORY = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB")


def death(error: RayError, who: str, step: str, *, killed: str = "", place: str = "") -> WorkerDied | None:
    """The death of a process that Ray reports; None if it may still be there. `step` is the call it was in, such as
    "train at optimizer step 12"; `killed` why it was killed here, if it was; `place` the code of its last heartbeat."""
    if not _ended(error):
        return None
    if killed:
        text = f"its process was killed during {step}: {killed}"
    elif isinstance(error, OutOfMemoryError):
        text = f"its process was killed by Ray during {step}: {_out_of_memory(str(error))}"
    else:
        last = f"; last heartbeat in {place}" if place else ""
        text = (
            f"its process died during {step} ({words(error)}{last}); unless someone killed it, see the machine's log "
            f"(dmesg: out of memory?) and Ray's logs ({logs()})"
        )
    died = WorkerDied(f"{who}: {text}")
    died.details = str(error)
    return died


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
    """Ray's page of numbers in one line: the memory of the machine, and what to do."""
    numbers = MEMORY.search(text)
    known = f" ({numbers[1]} of {numbers[2]} GB in use)" if numbers else ""
    return (
        f"the machine ran out of memory{known}; end other programs there, use fewer ranks or engines on it, a lower "
        "precision or smaller batches, or raise Ray's limit (the variable RAY_memory_usage_threshold, 0.95 by default)"
    )
